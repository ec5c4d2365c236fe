//! `emberflow doctor`.

use std::{fs, process::Command, time::Instant};

use serde::Serialize;

use super::{Context, Failure, output, pipeline_args::working_folder};
use crate::{
    learn,
    pipeline::spec::DeviceKind,
    remedy::Remedy,
    storage::{Location, StorageError},
};

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A store to reach [default: hdfs:///, if Hadoop's configuration names a file system].
    #[arg(long, value_name = "URL")]
    db: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One thing looked at.
#[derive(Debug, Serialize)]
struct Finding {
    what: &'static str,
    fine: bool,
    detail: String,
}

/// Looks at everything a run may need. Exit code 0 if no run here would miss anything: a GPU,
/// a ticket and Hadoop's configuration are told of, but not every run needs them.
pub(super) async fn run(context: &Context, args: &Args) -> Result<u8, Failure> {
    let scratch = scratch(context);
    let mut code = if scratch.fine { 0 } else { Remedy::FixFile.exit_code() };
    let mut findings = vec![versions(), cores(), memory(), scratch];
    findings.extend([DeviceKind::Cpu, DeviceKind::Wgpu, DeviceKind::Cuda].map(device));
    findings.push(hadoop(context));
    findings.push(ticket());
    let default_fs = context.config.hadoop_conf_dir.as_ref().is_some_and(|folder| {
        fs::read_to_string(folder.join("core-site.xml")).is_ok_and(|text| text.contains("fs.defaultFS"))
    });
    let store = args.db.clone().or_else(|| default_fs.then(|| "hdfs:///".to_owned()));
    if let Some(store) = store {
        let location = Location::parse(&store, &working_folder()?)?;
        let (finding, remedy) = reach(context, &store, &location).await;
        code = remedy.map_or(code, Remedy::exit_code);
        findings.push(finding);
    }
    if args.json {
        output::print_json(&findings)?;
    } else {
        let line = |finding: &Finding| {
            vec![if finding.fine { "ok" } else { "--" }.to_owned(), finding.what.to_owned(), finding.detail.clone()]
        };
        let rows: Vec<_> = findings.iter().map(line).collect();
        output::print(&output::table(&["", "what", "found"], &rows))?;
    }
    Ok(code)
}

fn finding(what: &'static str, found: Result<String, String>) -> Finding {
    let fine = found.is_ok();
    Finding { what, fine, detail: found.unwrap_or_else(|problem| problem) }
}

fn versions() -> Finding {
    let text = format!(
        "emberflow {}, datafusion {}, arrow {}",
        env!("CARGO_PKG_VERSION"),
        datafusion::DATAFUSION_VERSION,
        arrow::ARROW_VERSION
    );
    finding("versions", Ok(text))
}

fn cores() -> Finding {
    let cores = std::thread::available_parallelism().map(|cores| format!("{cores} cores"));
    finding("processor", cores.map_err(|error| error.to_string()))
}

fn memory() -> Finding {
    let available = || {
        let text = fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(format!("{:.1} GiB available", kib as f64 / f64::from(1 << 20)))
    };
    finding("memory", available().ok_or_else(|| "unknown on this system".to_owned()))
}

fn scratch(context: &Context) -> Finding {
    let folder = context.config.scratch_dir.clone().unwrap_or_else(std::env::temp_dir);
    let probe = tempfile::tempfile_in(&folder);
    let shown = folder.display().to_string();
    finding("scratch folder", probe.map(|_| shown.clone()).map_err(|error| format!("{shown}: {error}")))
}

fn device(kind: DeviceKind) -> Finding {
    let what = match kind {
        DeviceKind::Cpu => "device cpu",
        DeviceKind::Wgpu => "device wgpu",
        DeviceKind::Cuda => "device cuda",
    };
    let names: Vec<_> = learn::devices(kind).into_iter().map(|device| device.name).collect();
    match learn::check_device(kind, 1) {
        Ok(()) => finding(what, Ok(names.join(", "))),
        Err(error) => finding(what, Err(error.to_string())),
    }
}

fn hadoop(context: &Context) -> Finding {
    let found = match &context.config.hadoop_conf_dir {
        None => Err("no configuration: set HADOOP_CONF_DIR, or hadoop_conf_dir in conf/emberflow.yaml".to_owned()),
        Some(folder) => {
            let missing: Vec<_> =
                ["core-site.xml", "hdfs-site.xml"].into_iter().filter(|name| !folder.join(name).exists()).collect();
            let shown = folder.display();
            if missing.is_empty() {
                Ok(shown.to_string())
            } else {
                Err(format!("{shown}: no {}", missing.join(", no ")))
            }
        }
    };
    finding("Hadoop configuration", found)
}

fn ticket() -> Finding {
    let found = match Command::new("klist").arg("-s").status() {
        Ok(status) if status.success() => Ok("a valid ticket".to_owned()),
        Ok(_) => Err("no valid ticket (needed only where HDFS uses Kerberos): kinit".to_owned()),
        Err(_) => Err("klist is not installed (needed only where HDFS uses Kerberos)".to_owned()),
    };
    finding("Kerberos", found)
}

async fn reach(context: &Context, store: &str, location: &Location) -> (Finding, Option<Remedy>) {
    use crate::remedy::Remedied;
    let started = Instant::now();
    match context.storage.children(location).await {
        Ok(children) => {
            let ms = started.elapsed().as_secs_f64() * 1e3;
            (finding("store", Ok(format!("{store}: {} entries listed in {ms:.0} ms", children.len()))), None)
        }
        Err(error) => {
            let remedy = error.remedy();
            (finding("store", Err(chain(&error))), Some(remedy))
        }
    }
}

fn chain(error: &StorageError) -> String {
    use std::error::Error;
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
