//! `emberflow init`.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

use super::{Failure, output};

/// Arguments of `init`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The folder [default: the working directory].
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
}

const PIPELINE: &str = "# Sensors: four readings to two numbers.
version: 1
name: sensors
store: ${out}

params:
  data: { type: path, default: data/sensors.csv, description: CSV file or folder }
  out:  { type: path, default: out, description: Folder of all results }

sources:
  readings: { path: \"${data}\" }

transforms:
  clean: { file: clean.sql }

models:
  sensors:
    from: clean
    features:
      - columns: [temperature, humidity, pressure, vibration]
        scale: standard
    hidden: [8]
    latent: 2
    train: { epochs: 20, batch: 64 }

embeddings:
  sensor_embeddings:
    model: sensors
    key: [id]
    reconstruction_error: true
";

const SQL: &str = "-- Rows with a reading of every kind.
SELECT id, temperature, humidity, pressure, vibration
FROM readings
WHERE temperature IS NOT NULL
";

/// Writes a small project that runs as it stands; never overwrites.
pub(super) fn run(args: &Args) -> Result<u8, Failure> {
    let files =
        [("sensors.yaml", PIPELINE.to_owned()), ("clean.sql", SQL.to_owned()), ("data/sensors.csv", readings())];
    let folder = args.folder.clone().unwrap_or_default();
    for (name, _) in &files {
        let file = folder.join(name);
        if file.exists() {
            let message = format!("{}: exists already; name another folder", file.display());
            return Err(Failure::usage(message));
        }
    }
    for (name, content) in &files {
        let file = folder.join(name);
        write(&file, content).map_err(|error| Failure::target(file.display(), &error))?;
    }
    let pipeline = folder.join("sensors.yaml");
    let (pipeline, store) = (pipeline.display(), folder.join("out"));
    output::print(&format!(
        "wrote {pipeline}, its SQL and some data\n\nnext:\n    emberflow explain {pipeline}\n    \
         emberflow run {pipeline}\n    emberflow sql --db {} \"SELECT * FROM sensor_embeddings LIMIT 5\"\n",
        store.display()
    ))?;
    Ok(0)
}

fn write(file: &Path, content: &str) -> io::Result<()> {
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(file, content)
}

/// 500 readings along two hidden rhythms.
fn readings() -> String {
    let mut text = "id,temperature,humidity,pressure,vibration\n".to_owned();
    for id in 0..500_u32 {
        let (day, week) = ((f64::from(id) * 0.26).sin(), (f64::from(id) * 0.037).cos());
        let (temperature, humidity) = (18.0 + 6.0 * day + 2.0 * week, 55.0 - 12.0 * day);
        let (pressure, vibration) = (1013.0 + 9.0 * week, 0.4 + 0.1 * day * week);
        // Writing into a string cannot fail.
        let _ = writeln!(text, "{id},{temperature:.2},{humidity:.2},{pressure:.2},{vibration:.4}");
    }
    text
}
