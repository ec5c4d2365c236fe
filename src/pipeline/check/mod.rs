//! From what the file says to what is true: names resolved, numbers in range, stages in order.

mod model;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    decode::Mended,
    document::{Node, Origin},
    faults::{Elsewhere, Fault, SqlFile, did_you_mean},
    params::{Expanded, Params},
    plan::{EmbeddingPlan, MAX_EXECUTORS, RunPlan, SourcePlan, TransformPlan, cores},
    spec::{Choice, EmbeddingSpec, FileFormat, PipelineSpec, RunSpec, SourceSpec, TransformSpec},
    sql::{self, SqlFault},
};
use crate::{limits, storage::Location};

/// Tables that every SQL session has.
const RESERVED_TABLES: [&str; 4] = ["runs", "run_metrics", "epochs", "ranks"];

/// Columns that an embedding table has of its own.
const RESERVED_COLUMNS: [&str; 2] = ["embedding", "reconstruction_error"];

/// Checks a decoded file against itself and collects the faults.
pub(super) struct Checker<'a> {
    pub origin: &'a Origin,
    pub params: &'a Params,
    pub mended: &'a Mended,
    /// What relative paths count from; absolute.
    pub folder: &'a Path,
    pub faults: Vec<Fault>,
}

impl Checker<'_> {
    /// Notes a fault at a path, unless the value there is a stand-in.
    fn fault(&mut self, path: &[&str], message: impl Into<String>, help: Option<String>) {
        if !self.mended.covers(path) {
            let span = self.origin.root().mark(self.origin.text(), path);
            self.faults.push(Fault { message: message.into(), span, help, elsewhere: None });
        }
    }

    /// Notes a fault at a path unless the condition holds.
    fn require(&mut self, holds: bool, path: &[&str], message: &str, help: &str) {
        if !holds {
            self.fault(path, message, (!help.is_empty()).then(|| help.to_owned()));
        }
    }

    /// Version, name, and that names are names and no two tables share one.
    pub fn names(&mut self, spec: &PipelineSpec) {
        self.require(spec.version == 1, &["version"], "this version of the format is not known", "write `version: 1`");
        self.name(&["name"], &spec.name);
        let (origin, mut taken) = (self.origin, BTreeMap::new());
        for section in ["params", "sources", "transforms", "embeddings", "models"] {
            for entry in origin.root().get(&[section]).map_or(&[][..], Node::entries) {
                let (path, name) = ([section, entry.key.as_str()], entry.key.as_str());
                self.key_name(&path, name);
                if section == "params" || section == "models" {
                    continue;
                }
                if RESERVED_TABLES.contains(&name) {
                    self.key_fault(&path, format!("`{name}` is a table of every session"), Some("choose another name"));
                } else if let Some(other) = taken.insert(name, section) {
                    let message = format!("`{name}` is also the name of one of the {other}");
                    self.key_fault(&path, message, Some("sources, transforms and embeddings share one set of names"));
                }
            }
        }
    }

    fn name(&mut self, path: &[&str], name: &str) {
        let help = "start with a lower-case letter, go on with lower-case letters, digits and `_`";
        self.require(is_name(name), path, &format!("`{name}` is no name"), help);
    }

    fn key_name(&mut self, path: &[&str], name: &str) {
        if !is_name(name) {
            let help = "start with a lower-case letter, go on with lower-case letters, digits and `_`";
            self.key_fault(path, format!("`{name}` is no name"), Some(help));
        }
    }

    fn key_fault(&mut self, path: &[&str], message: String, help: Option<&str>) {
        let span = self.origin.root().mark_key(self.origin.text(), path);
        self.faults.push(Fault { message, span, help: help.map(str::to_owned), elsewhere: None });
    }

    /// The settings of a run.
    pub fn run(&mut self, run: &RunSpec) -> RunPlan {
        let choose_executors = run.executors == Choice::Auto;
        let executors = match run.executors {
            Choice::Auto => run.max_executors.unwrap_or_else(cores),
            Choice::Fixed(executors) => executors,
        };
        let path = ["run", if choose_executors { "max_executors" } else { "executors" }];
        self.require((1..=MAX_EXECUTORS).contains(&executors), &path, "expected 1 to 1024 executors", "");
        let path = ["run", "memory"];
        let memory_bytes = size_bytes(&run.memory).unwrap_or_else(|| {
            let help = "write a number and a unit, such as `512MiB` or `4GiB`".to_owned();
            self.fault(&path, format!("`{}` is no size", run.memory), Some(help));
            limits::MEMORY_BYTES
        });
        let least = limits::MIN_MEMORY_BYTES;
        let help = format!("give it at least {}MiB", least >> 20);
        self.require(memory_bytes >= least, &path, "too little memory to hold a few batches", &help);
        let all = if choose_executors { 1 } else { executors.max(1) };
        let (min, max) = (run.min_executors.unwrap_or(all), run.max_executors.unwrap_or(executors));
        let fits = (1..=executors.max(1)).contains(&min);
        self.require(fits, &["run", "min_executors"], "expected 1 up to the number of `executors`", "");
        let fits = (executors..=MAX_EXECUTORS).contains(&max);
        self.require(fits, &["run", "max_executors"], "expected the number of `executors`, up to 1024", "");
        RunPlan {
            executors,
            choose_executors,
            launcher: run.launcher,
            min_executors: min,
            max_executors: max,
            device: run.device,
            memory_bytes,
            seed: run.seed,
        }
    }

    /// A path or URL of the file.
    pub fn location(&mut self, path: &[&str], text: &str) -> Option<Location> {
        if text.trim().is_empty() {
            self.fault(path, "expected a path or URL, found nothing", None);
            return None;
        }
        match Location::parse(text, self.folder) {
            Ok(location) => Some(location),
            Err(error) => {
                self.fault(path, error.to_string(), None);
                None
            }
        }
    }

    /// The folder that receives results.
    pub fn store(&mut self, text: &str) -> Option<Location> {
        let location = self.location(&["store"], text)?;
        self.require(!location.is_glob(), &["store"], "a store is one folder, not a pattern", "");
        Some(location)
    }

    /// One source.
    pub fn source(&mut self, name: &str, spec: &SourceSpec) -> Option<SourcePlan> {
        let at = ["sources", name];
        for (column, kind) in &spec.columns {
            let help = "such as BIGINT, DOUBLE, VARCHAR, DATE, TIMESTAMP, BOOLEAN or DECIMAL(10,2)";
            let message = format!("`{kind}` is no SQL type of a column");
            self.require(sql::is_column_type(kind), &[at[0], at[1], "columns", column], &message, help);
        }
        if let Some(csv) = &spec.csv {
            let is_csv = !matches!(spec.format, Some(FileFormat::Parquet | FileFormat::Arrow));
            self.require(is_csv, &[at[0], at[1], "csv"], "`csv` is for CSV files", "remove it, or write `format: csv`");
            let separates = csv.delimiter.is_ascii() && !matches!(csv.delimiter, '"' | '\n' | '\r' | '\0');
            let message = "this character cannot separate fields";
            self.require(
                separates,
                &[at[0], at[1], "csv", "delimiter"],
                message,
                "use one such as `,` `;` `|` or \"\\t\"",
            );
        }
        Some(SourcePlan {
            name: name.to_owned(),
            location: self.location(&[at[0], at[1], "path"], &spec.path)?,
            format: spec.format,
            columns: spec.columns.clone(),
            csv: spec.csv.clone().unwrap_or_default(),
        })
    }

    /// All transforms, each after its inputs.
    pub fn transforms(&mut self, specs: &BTreeMap<String, TransformSpec>) -> Vec<TransformPlan> {
        // A name that is also a source's has its fault already.
        let own = |name: &str| !self.keys("sources").any(|source| source == name);
        let named: Vec<_> = specs.iter().filter(|(name, _)| own(name)).collect();
        let plans: BTreeMap<_, _> =
            named.into_iter().filter_map(|(name, spec)| Some((name.as_str(), self.transform(name, spec)?))).collect();
        let mut order = Order { plans: &plans, done: BTreeSet::new(), sorted: Vec::new(), cycles: Vec::new() };
        for name in plans.keys() {
            order.visit(name, &mut Vec::new());
        }
        let Order { sorted, cycles, .. } = order;
        for cycle in cycles {
            let message = format!("transforms feed one another: {}", cycle.join(" → "));
            self.key_fault(&["transforms", cycle[0]], message, Some("a transform reads what is made before it"));
        }
        sorted.into_iter().filter_map(|name| plans.get(name).cloned()).collect()
    }

    fn transform(&mut self, name: &str, spec: &TransformSpec) -> Option<TransformPlan> {
        if ["sql", "file"].iter().any(|key| self.mended.covers(&["transforms", name, key])) {
            return None;
        }
        let query = match (&spec.sql, &spec.file) {
            (Some(_), None) => self.inline_query(name)?,
            (None, Some(file)) => self.query_file(name, file)?,
            (Some(_), Some(_)) => {
                self.fault(&["transforms", name, "file"], "give `sql` or `file`, not both", None);
                return None;
            }
            (None, None) => {
                self.fault(&["transforms", name], "a transform needs its query", Some("give `sql` or `file`".into()));
                return None;
            }
        };
        let tables = match sql::tables(&query.expanded.text) {
            Ok(tables) => tables,
            Err(fault) => {
                self.query_fault(name, &query, fault);
                return None;
            }
        };
        let mut inputs = Vec::new();
        for table in tables {
            if !self.is_table(&table.name) {
                let (message, help) = self.no_table(&table.name);
                self.query_fault(name, &query, SqlFault { message, range: table.range, help: Some(help) });
            }
            inputs.push(table.name);
        }
        let sql = query.expanded.text.trim().trim_end_matches(';').trim_end().to_owned();
        Some(TransformPlan { name: name.to_owned(), sql, inputs })
    }

    fn inline_query(&mut self, name: &str) -> Option<Query> {
        let text = self.origin.root().get(&["transforms", name, "sql"])?.scalar()?;
        Some(Query { expanded: self.params.expand(text).ok()??, file: None })
    }

    fn query_file(&mut self, name: &str, file: &str) -> Option<Query> {
        let path = ["transforms", name, "file"];
        let text = match read_text(&self.folder.join(file)) {
            Ok(text) => text,
            Err(message) => {
                self.fault(&path, format!("{file}: {message}"), None);
                return None;
            }
        };
        let shown = tidy(&Path::new(self.origin.file()).with_file_name("").join(file));
        let file = Arc::new(SqlFile { path: shown.display().to_string(), text });
        match self.params.expand(&file.text) {
            Ok(expanded) => Some(Query { expanded: expanded?, file: Some(file) }),
            Err(faults) => {
                let elsewhere = |fault| Fault { elsewhere: Some(Elsewhere::Sql(Arc::clone(&file))), ..fault };
                self.faults.extend(faults.into_iter().map(elsewhere));
                None
            }
        }
    }

    /// A fault within a query: in the SQL file, or in the scalar of the pipeline file.
    fn query_fault(&mut self, name: &str, query: &Query, fault: SqlFault) {
        let source = query.expanded.source(fault.range);
        let span = match (&query.file, self.origin.root().get(&["transforms", name, "sql"])) {
            (None, Some(node)) => node.locate(self.origin.text(), source),
            _ => source,
        };
        let elsewhere = query.file.clone().map(Elsewhere::Sql);
        self.faults.push(Fault { message: fault.message, span, help: fault.help, elsewhere });
    }

    /// One embedding table; `from` is what its model learns from.
    pub fn embedding(&mut self, name: &str, spec: &EmbeddingSpec, from: Option<&str>) -> EmbeddingPlan {
        let at = |rest: &'static str| ["embeddings", name, rest];
        if from.is_none() && !self.is_key("models", &spec.model) {
            let help = self.suggest(&spec.model, &["models"]);
            self.fault(&at("model"), format!("there is no model `{}`", spec.model), help);
        }
        if let Some(from) = &spec.from {
            self.table(&at("from"), from);
        }
        let mut seen = BTreeSet::new();
        for (list, columns) in [("key", &spec.key), ("columns", &spec.columns)] {
            for (index, column) in columns.iter().enumerate() {
                let path = ["embeddings", name, list, &index.to_string()];
                if RESERVED_COLUMNS.contains(&column.as_str()) {
                    let help = "rename the column in a transform".to_owned();
                    self.fault(&path, format!("`{column}` is a column that embedding tables have anyway"), Some(help));
                } else if !seen.insert(column) {
                    self.fault(&path, format!("column `{column}` is named twice"), None);
                }
            }
        }
        self.require(spec.keep_versions >= 1, &at("keep_versions"), "at least one version is kept", "");
        EmbeddingPlan {
            name: name.to_owned(),
            model: spec.model.clone(),
            from: spec.from.as_deref().or(from).unwrap_or_default().to_owned(),
            key: spec.key.clone(),
            columns: spec.columns.clone(),
            reconstruction_error: spec.reconstruction_error,
            encoding: spec.encoding,
            keep_versions: spec.keep_versions,
        }
    }

    /// Notes a fault unless there is a source or transform of that name.
    fn table(&mut self, path: &[&str], name: &str) {
        if !self.is_table(name) {
            let (message, help) = self.no_table(name);
            self.fault(path, message, Some(help));
        }
    }

    fn is_table(&self, name: &str) -> bool {
        self.is_key("sources", name) || self.is_key("transforms", name)
    }

    /// Whether a section of the file has that key; true where the section is not readable.
    fn is_key(&self, section: &str, name: &str) -> bool {
        self.mended.covers(&[section]) || self.keys(section).any(|key| key == name)
    }

    fn keys(&self, section: &str) -> impl Iterator<Item = &str> {
        self.origin.root().get(&[section]).map_or(&[][..], Node::entries).iter().map(|entry| entry.key.as_str())
    }

    fn no_table(&self, name: &str) -> (String, String) {
        let help = self.suggest(name, &["sources", "transforms"]);
        let help = help.unwrap_or_else(|| "name it under `sources` or `transforms`".to_owned());
        (format!("there is no source or transform `{name}`"), help)
    }

    fn suggest(&self, name: &str, sections: &[&str]) -> Option<String> {
        did_you_mean(name, sections.iter().flat_map(|section| self.keys(section)))
    }
}

/// A transform's query with parameters filled in, and the file that it came from.
struct Query {
    expanded: Expanded,
    file: Option<Arc<SqlFile>>,
}

/// Depth-first order of transforms; a path that meets itself is a cycle.
struct Order<'a> {
    plans: &'a BTreeMap<&'a str, TransformPlan>,
    done: BTreeSet<&'a str>,
    sorted: Vec<&'a str>,
    cycles: Vec<Vec<&'a str>>,
}

impl<'a> Order<'a> {
    fn visit(&mut self, name: &'a str, path: &mut Vec<&'a str>) {
        if let Some(start) = path.iter().position(|step| *step == name) {
            self.cycles.push(path[start..].iter().copied().chain([name]).collect());
            return;
        }
        let Some(plan) = self.plans.get(name) else { return };
        if self.done.contains(name) {
            return;
        }
        path.push(name);
        plan.inputs.iter().for_each(|input| self.visit(input, path));
        path.pop();
        self.done.insert(name);
        self.sorted.push(name);
    }
}

/// Lower-case letters, digits and `_`, starting with a letter: safe in SQL, paths and URLs.
fn is_name(text: &str) -> bool {
    let letter = |c: char| c.is_ascii_lowercase();
    text.len() <= 64 && text.starts_with(letter) && text.chars().all(|c| letter(c) || c.is_ascii_digit() || c == '_')
}

/// A number with a unit of bytes, in thousands (`GB`) or in 1024s (`GiB`).
fn size_bytes(text: &str) -> Option<u64> {
    let split = text.find(|c: char| c.is_ascii_alphabetic())?;
    let number: f64 = text[..split].trim().parse().ok()?;
    let power = |base: u64, exponent| Some(base.pow(exponent));
    let unit = match text[split..].to_ascii_lowercase().as_str() {
        "kib" => power(1024, 1),
        "mib" => power(1024, 2),
        "gib" => power(1024, 3),
        "tib" => power(1024, 4),
        "kb" => power(1000, 1),
        "mb" => power(1000, 2),
        "gb" => power(1000, 3),
        "tb" => power(1000, 4),
        _ => None,
    }?;
    (number >= 0.0 && number.is_finite()).then_some((number * unit as f64) as u64)
}

/// A text file of bounded size.
pub(super) fn read_text(path: &Path) -> Result<String, String> {
    use std::io::Read;
    let limit = limits::PIPELINE_FILE_BYTES;
    let read = || {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(limit + 1).read_to_end(&mut bytes).map(|_| bytes)
    };
    let bytes = read().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => "no such file".to_owned(),
        std::io::ErrorKind::IsADirectory => "a folder, not a file".to_owned(),
        std::io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    })?;
    if bytes.len() as u64 > limit {
        return Err(format!("larger than {}MiB, surely another file", limit >> 20));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..valid].split(|byte| *byte == b'\n').count();
        format!("line {line} is not UTF-8 text")
    })
}

/// A path without `..` behind a name: for showing, not for opening.
fn tidy(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        let after_name = matches!(out.components().next_back(), Some(std::path::Component::Normal(_)));
        if part == std::path::Component::ParentDir && after_name {
            out.pop();
        } else {
            out.push(part);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, expected) in [
            ("512MiB", Some(512 << 20)),
            ("1.5 GB", Some(1_500_000_000)),
            ("4gib", Some(4 << 30)),
            ("1TB", Some(1_000_000_000_000)),
            ("512", None),
            ("MiB", None),
            ("-1GiB", None),
            ("1e3GiB", None),
            ("infGiB", None),
        ] {
            assert_eq!(size_bytes(text), expected, "{text}");
        }
    }

    #[test]
    fn shown_paths_are_tidy() {
        for (path, expected) in
            [("a/../sql/x.sql", "sql/x.sql"), ("../x", "../x"), ("/a/b/../../c", "/c"), ("./x", "./x")]
        {
            assert_eq!(tidy(Path::new(path)), Path::new(expected));
        }
    }
}
