//! Events as JSON lines, a public format: docs/events.md.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::Path,
    sync::{Mutex, PoisonError},
};

use serde::Serialize;

use super::{Event, Listener};
use crate::ids::RunId;

/// Version of the format; it changes when a reader would have to.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Line<'a> {
    v: u32,
    time: String,
    run_id: &'a RunId,
    #[serde(flatten)]
    event: &'a Event,
}

/// Opens a file to go on with: a retry adds its events to those of earlier attempts. A line
/// that a crash cut off is ended, so that what follows can be read.
pub fn open_event_file(path: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
    // Pipes and terminals have no end to look at.
    if file.metadata()?.is_file() && file.seek(SeekFrom::End(0))? > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
        }
    }
    Ok(file)
}

/// Writes each event as one line and flushes it. A sink that fails is told of once; a run is
/// not lost for its log.
pub fn json_lines(sink: impl Write + Send + 'static) -> Listener {
    let sink = Mutex::new(Some(sink));
    Box::new(move |run_id, event| {
        let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = sink.as_mut() else { return };
        let time = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Millis, true);
        let written = serde_json::to_string(&Line { v: VERSION, time, run_id, event })
            .map_err(io::Error::from)
            // In one piece, so that a kill leaves no half of a line.
            .and_then(|line| open.write_all(format!("{line}\n").as_bytes()))
            .and_then(|()| open.flush());
        if let Err(error) = written {
            tracing::warn!(%error, "events can no longer be written");
            *sink = None;
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn one_object_per_line() {
        let sink = Sink::default();
        let listener = json_lines(sink.clone());
        let run_id = RunId::new("r").unwrap();
        listener(&run_id, &Event::Warning { message: "two\nlines".to_owned() });
        listener(&run_id, &Event::RunFinished { status: "succeeded".to_owned(), elapsed_s: 1.5 });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["event"], "warning");
        assert_eq!(lines[1]["run_id"], "r");
        assert_eq!(lines[1]["v"], 1);
    }

    #[test]
    fn a_file_is_gone_on_with() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (before, after) in [("", "x\n"), ("{}\n", "{}\nx\n"), ("{}\n{\"v\"", "{}\n{\"v\"\nx\n")] {
            std::fs::write(file.path(), before).unwrap();
            open_event_file(file.path()).unwrap().write_all(b"x\n").unwrap();
            assert_eq!(std::fs::read_to_string(file.path()).unwrap(), after);
        }
        open_event_file(Path::new("/dev/null")).unwrap();
    }

    struct Broken;

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_does_not_stop_a_run() {
        let listener = json_lines(Broken);
        let run_id = RunId::new("r").unwrap();
        for _ in 0..2 {
            listener(&run_id, &Event::Warning { message: String::new() });
        }
    }
}
