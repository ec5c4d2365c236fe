//! Events for people: bars on a terminal, plain lines elsewhere; both on stderr.

use std::{
    io::Write,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use super::{Event, Listener};

/// Plain lines are written at most this often, but for what comes only once.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

/// One bar per stage.
pub fn bars() -> Listener {
    let current: Mutex<Option<ProgressBar>> = Mutex::new(None);
    Box::new(move |_, event| {
        let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::StageStarted { kind, name, total, unit } => *current = Some(bar(kind, name, *total, unit)),
            Event::Progress { done, .. } => {
                if let Some(bar) = current.as_ref() {
                    bar.set_position(*done);
                }
            }
            Event::Epoch { epoch, .. } => {
                if let Some(bar) = current.as_ref() {
                    bar.set_position(u64::from(*epoch));
                    bar.set_message(epoch_text(event));
                }
            }
            Event::StageFinished { .. } => {
                if let Some(bar) = current.take() {
                    bar.finish();
                }
            }
            other => {
                if let Some(text) = text(other) {
                    match current.as_ref() {
                        Some(bar) => bar.println(text),
                        None => say(&text),
                    }
                }
            }
        }
    })
}

fn bar(kind: &str, name: &str, total: Option<u64>, unit: &str) -> ProgressBar {
    let (bar, template) = match total {
        Some(total) => (ProgressBar::new(total), "{prefix} {bar:30} {human_pos}/{human_len} {unit}  {elapsed}  {msg}"),
        None => (ProgressBar::new_spinner(), "{prefix} {spinner} {elapsed}  {msg}"),
    };
    let template = template.replace("{unit}", unit);
    bar.set_style(ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(format!("{kind:<8}{name}"));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// A line for what matters, and at most one a second for what repeats.
pub fn lines() -> Listener {
    let last: Mutex<Option<Instant>> = Mutex::new(None);
    Box::new(move |_, event| {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        let line = match event {
            Event::Epoch { model, epoch, epochs, .. } => {
                if last.is_some_and(|last| last.elapsed() < BETWEEN_LINES) && epoch != epochs && *epoch != 1 {
                    return;
                }
                *last = Some(Instant::now());
                Some(format!("train   {model}: epoch {epoch}/{epochs}, {}", epoch_text(event)))
            }
            Event::StageFinished { kind, name, elapsed_s } => {
                Some(format!("{kind:<8}{name}: done in {elapsed_s:.1} s"))
            }
            other => text(other),
        };
        if let Some(line) = line {
            say(&line);
        }
    })
}

fn epoch_text(event: &Event) -> String {
    let Event::Epoch { loss, held_out_loss, rows_per_s, .. } = event else { return String::new() };
    let held_out = held_out_loss.map(|loss| format!(", held out {loss:.6}")).unwrap_or_default();
    format!("loss {loss:.6}{held_out}, {rows_per_s:.0} rows/s")
}

/// What comes seldom, as one line.
fn text(event: &Event) -> Option<String> {
    match event {
        Event::RunStarted { attempt, resumed: true, .. } => Some(format!("resumed by attempt {attempt}")),
        Event::Committed { table, version, rows, location, .. } => {
            Some(format!("commit  {table}: version {version}, {rows} rows at {location}"))
        }
        Event::Decision { model, why, .. } => Some(format!("decided {model}: {why}")),
        Event::Warning { message } => Some(format!("warning: {message}")),
        Event::Ledger(ledger) if !ledger.rejected.is_empty() => {
            let reasons: Vec<_> =
                ledger.rejected.iter().map(|(reason, rows)| format!("{rows} rows: {reason}")).collect();
            Some(format!("{}: left out {}", ledger.name, reasons.join("; ")))
        }
        _ => None,
    }
}

/// A line on stderr; one that cannot be written is not worth a run.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
