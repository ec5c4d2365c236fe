//! Which files are data: not what is hidden or temporary; and globs.

/// Endings of files that are being written or only check others.
const TEMPORARY: [&str; 6] = [".crc", ".tmp", ".part", ".part.parquet", ".inprogress", "._COPYING_"];

/// Whether a file at this path below the listed folder is data.
pub(super) fn is_data(path_below: &str) -> bool {
    let hidden = |segment: &str| {
        // `_day=1` is a partition folder, `_SUCCESS` is not.
        segment.starts_with('.') || (segment.starts_with('_') && !segment.contains('='))
    };
    let name = path_below.rsplit('/').next().unwrap_or_default();
    !name.is_empty() && !path_below.split('/').any(hidden) && !TEMPORARY.iter().any(|end| name.ends_with(end))
}

/// The folder above the first segment with a glob character, and the pattern below it.
pub(super) fn split_glob(path: &str) -> (&str, &str) {
    let glob = path.find(['*', '?', '[', '{']).unwrap_or(path.len());
    match path[..glob].rfind('/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => ("", path),
    }
}

/// A pattern over paths below a folder. A pattern that matches a folder takes all below it.
#[derive(Debug)]
pub(super) struct Pattern(Vec<glob::Pattern>);

impl Pattern {
    /// `None` where the pattern is malformed.
    pub(super) fn new(pattern: &str) -> Option<Self> {
        let compiled: Result<_, _> = expand_braces(pattern).iter().map(|text| glob::Pattern::new(text)).collect();
        compiled.ok().map(Self)
    }

    pub(super) fn matches(&self, path_below: &str) -> bool {
        let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
        let ends = path_below.match_indices('/').map(|(at, _)| at).chain([path_below.len()]);
        let mut ends = ends.map(|end| &path_below[..end]);
        ends.any(|prefix| self.0.iter().any(|pattern| pattern.matches_with(prefix, options)))
    }
}

/// `a{b,c}d` as `abd` and `acd`, for any number of groups, none inside another.
fn expand_braces(pattern: &str) -> Vec<String> {
    let group = pattern.find('{').and_then(|open| Some((open, open + pattern[open..].find('}')?)));
    let Some((open, close)) = group else { return vec![pattern.to_owned()] };
    let rest = expand_braces(&pattern[close + 1..]);
    let choices = pattern[open + 1..close].split(',');
    choices.flat_map(|choice| rest.iter().map(move |rest| format!("{}{choice}{rest}", &pattern[..open]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_and_temporary_files_are_not_data() {
        let data = ["a.parquet", "day=1/a.parquet", "_day=1/a", "a/b/c.csv", "part-0.parquet"];
        let other = [
            "_SUCCESS",
            ".a.parquet.crc",
            "a.crc",
            "_temporary/0/a.parquet",
            ".hive-staging_1/a",
            "a.parquet._COPYING_",
            "a.tmp",
            "b.inprogress",
            "a.part.parquet",
            "",
        ];
        for path in data {
            assert!(is_data(path), "{path}");
        }
        for path in other {
            assert!(!is_data(path), "{path}");
        }
    }

    #[test]
    fn globs() {
        let check = |glob: &str, path: &str, expected: bool| {
            let (folder, pattern) = split_glob(glob);
            let below = path.strip_prefix(folder).unwrap().trim_start_matches('/');
            assert_eq!(Pattern::new(pattern).unwrap().matches(below), expected, "{glob} {path}");
        };
        check("a/*.parquet", "a/b.parquet", true);
        check("a/*.parquet", "a/b/c.parquet", false);
        check("a/**/*.parquet", "a/b/c.parquet", true);
        check("a/day=*", "a/day=1/c.parquet", true);
        check("a/day={1,2}/*", "a/day=2/c", true);
        check("a/day={1,2}/*", "a/day=3/c", false);
        check("a/[bc].csv", "a/c.csv", true);
        check("a/?.csv", "a/cd.csv", false);
    }
}
