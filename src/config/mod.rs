//! A site's settings: `conf/emberflow.yaml` and the environment, checked once.

pub mod env_vars;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::remedy::{Remedied, Remedy};

/// What holds for every run on this site.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SiteConfig {
    /// Folder of core-site.xml and hdfs-site.xml: the setting, else `HADOOP_CONF_DIR`, else
    /// `$HADOOP_HOME/etc/hadoop` where that exists.
    pub hadoop_conf_dir: Option<PathBuf>,
    /// The HDFS user, where Kerberos is off: the setting, else `HADOOP_USER_NAME`.
    pub hadoop_user: Option<String>,
    /// Local folder for spilled data; default: the system's temporary folder.
    pub scratch_dir: Option<PathBuf>,
    /// Where a run with `launcher: static` listens for its executors, `host:port`; default: a free
    /// port of this machine alone.
    pub listen: Option<String>,
    /// File of the secret that a run and its executors share.
    pub token_file: Option<PathBuf>,
    /// PEM files of this machine's certificate chain, its key, and the authority that signed the
    /// others': TLS between a run and its executors.
    pub tls_certificate: Option<PathBuf>,
    /// See `tls_certificate`.
    pub tls_key: Option<PathBuf>,
    /// See `tls_certificate`.
    pub tls_authority: Option<PathBuf>,
    /// `yes`: executors on other machines may connect without TLS.
    pub allow_plain: Option<String>,
}

/// Where the settings are looked for, if neither a flag nor the environment names a file.
const PLACES: [&str; 2] = ["conf/emberflow.yaml", "/etc/emberflow/emberflow.yaml"];

impl SiteConfig {
    /// Reads the settings file (the one named, else the first found; none is fine) and fills
    /// in from the environment.
    pub fn load(named: Option<&Path>) -> Result<Self, ConfigError> {
        let named = named.map(Path::to_owned).or_else(|| env::var_os(env_vars::EMBERFLOW_CONF).map(PathBuf::from));
        let found = named.or_else(|| PLACES.iter().map(PathBuf::from).find(|place| place.exists()));
        let mut config = match found {
            Some(file) => Self::read(&file)?,
            None => Self::default(),
        };
        let hadoop_home = || env::var_os(env_vars::HADOOP_HOME).map(|home| PathBuf::from(home).join("etc/hadoop"));
        config.hadoop_conf_dir = (config.hadoop_conf_dir)
            .or_else(|| env::var_os(env_vars::HADOOP_CONF_DIR).map(PathBuf::from))
            .or_else(|| hadoop_home().filter(|folder| folder.exists()));
        config.hadoop_user = config.hadoop_user.or_else(|| env::var(env_vars::HADOOP_USER_NAME).ok());
        Ok(config)
    }

    fn read(file: &Path) -> Result<Self, ConfigError> {
        let named = || file.to_owned();
        let text = fs::read_to_string(file).map_err(|source| ConfigError::Unreadable { file: named(), source })?;
        Self::parse(&text).map_err(|reason| ConfigError::Malformed { file: named(), reason })
    }

    fn parse(text: &str) -> Result<Self, String> {
        use saphyr::{LoadableYamlNode, Yaml};
        let documents = Yaml::load_from_str(text).map_err(|error| error.to_string())?;
        let mut values = serde_json::Map::new();
        for (key, value) in documents.first().and_then(Yaml::as_mapping).into_iter().flatten() {
            let key = key.as_str().ok_or("a key is not a text")?;
            let value = match value {
                value if value.is_null() => serde_json::Value::Null,
                value => value.as_str().ok_or_else(|| format!("{key}: a text is expected"))?.into(),
            };
            values.insert(key.to_owned(), value);
        }
        serde_json::from_value(values.into()).map_err(|error| error.to_string())
    }
}

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: the settings cannot be read", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("{}: {reason}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl Remedied for ConfigError {
    fn remedy(&self) -> Remedy {
        Remedy::FixFile
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings() {
        let config = SiteConfig::parse("# nothing\nhadoop_conf_dir: /etc/hadoop\nhadoop_user:\n").unwrap();
        assert_eq!(config.hadoop_conf_dir, Some("/etc/hadoop".into()));
        assert_eq!(config.hadoop_user, None);
        assert_eq!(SiteConfig::parse("# empty\n").unwrap(), SiteConfig::default());
        assert!(SiteConfig::parse("hadop_user: x").unwrap_err().contains("hadop_user"));
        assert!(SiteConfig::parse("hadoop_user: [1]").unwrap_err().contains("hadoop_user"));
    }

    /// The annotated file in conf/ is what it says: every key known, every default the default.
    #[test]
    fn the_annotated_file_is_true() {
        let text = fs::read_to_string("conf/emberflow.yaml").unwrap();
        assert_eq!(SiteConfig::parse(&text).unwrap(), SiteConfig::default());
    }
}
