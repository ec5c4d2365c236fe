//! What a run tells while it works: one stream of events, which JSON lines and progress
//! printers both listen to.

mod event;
mod json_lines;
mod progress;

pub use event::{Event, Events, Ledger, Listener};
pub use json_lines::{json_lines, open_event_file};
pub use progress::{bars, lines};

/// The most memory this process has held so far (resident set), bytes; `None` where the
/// system does not tell.
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Processor seconds that this process has used so far, in all its threads.
pub fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    // Linux counts in hundredths for all programs, whatever its own clock is.
    Some((ticks()? + ticks()?) / 100.0)
}
