//! The arguments of every command that takes a pipeline file.

use std::path::{Path, PathBuf};

use super::Failure;
use crate::pipeline::PipelinePlan;

/// A pipeline file and its parameters.
#[derive(Debug, clap::Args)]
pub(super) struct PipelineArgs {
    /// The pipeline file.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    params: ParamArgs,
}

/// Parameters of a pipeline file.
#[derive(Debug, clap::Args)]
pub(super) struct ParamArgs {
    /// Set a parameter of the file; may be given several times.
    #[arg(long = "param", short, value_name = "NAME=VALUE", value_parser = pair)]
    params: Vec<(String, String)>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    pair.ok_or_else(|| "a parameter is given as NAME=VALUE".to_owned())
}

impl PipelineArgs {
    /// Reads and checks the file.
    pub(super) fn plan(&self) -> Result<PipelinePlan, Failure> {
        self.params.plan(&self.file)
    }
}

impl ParamArgs {
    /// Reads and checks a file with these parameters.
    pub(super) fn plan(&self, file: &Path) -> Result<PipelinePlan, Failure> {
        let folder = working_folder()?;
        Ok(PipelinePlan::read(file, &self.params, &folder)?)
    }
}

/// The folder that relative paths on the command line count from.
pub(super) fn working_folder() -> Result<PathBuf, Failure> {
    std::env::current_dir().map_err(|error| Failure::io("the working directory", error))
}
