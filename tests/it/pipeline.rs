//! Integration tests of `pipeline`.

use std::{fmt::Write, path::Path};

use emberflow::pipeline::{Elsewhere, Fault, Faults, PipelinePlan, json_schema, spec::Keep};
use proptest::prelude::*;
use saphyr::LoadableYamlNode;
use serde_json::Value;

/// A file without faults; the tables below change one thing of it.
const GOOD: &str = "\
version: 1
name: digits
store: out
params:
  ds: { type: date, default: 2026-12-01 }
  rows: { type: int, default: 10 }
run:
  executors: 2
sources:
  digits:
    path: data/day=${ds}
transforms:
  bright:
    sql: |
      SELECT id, pixels
      FROM digits
      WHERE label > 0
models:
  small:
    from: bright
    features:
      - column: pixels
        scale: { divide: 255 }
    latent: 8
    train:
      epochs: ${rows}
embeddings:
  vectors:
    model: small
    key: [id]
";

fn read(text: impl AsRef<[u8]>, params: &[(&str, &str)]) -> Result<PipelinePlan, Faults> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("p.yaml"), text).unwrap();
    let params: Vec<_> = params.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    PipelinePlan::read(Path::new("p.yaml"), &params, folder.path())
}

/// One line per fault: place, what is marked, message, help.
fn brief(faults: &Faults) -> String {
    let line = |fault: &Fault| {
        let (file, text) = match &fault.elsewhere {
            Some(Elsewhere::Sql(file)) => (format!("{}:", file.path), file.text.as_str()),
            Some(Elsewhere::CommandLine) => ("command line:".to_owned(), ""),
            None => (String::new(), &*faults.text),
        };
        let before = &text[..fault.span.start];
        let (line, column) =
            (before.matches('\n').count() + 1, before.chars().rev().take_while(|c| *c != '\n').count() + 1);
        let mut out = format!("{file}{line}:{column} [{}] {}", &text[fault.span.clone()], fault.message);
        if let Some(help) = &fault.help {
            write!(out, " | {help}").unwrap();
        }
        out
    };
    faults.faults.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Replaces parts of the good file and compares the faults.
#[track_caller]
pub(crate) fn check(changes: &[(&str, &str)], expected: &str) {
    let text = changes.iter().fold(GOOD.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "the good file has no {from:?}");
        text.replacen(from, to, 1)
    });
    let found = read(&text, &[]).map_or_else(|faults| brief(&faults), |_| "no fault".to_owned());
    assert_eq!(found, expected, "\n--- found\n{found}\n---");
}

#[test]
fn a_good_file_is_read() {
    let plan = read(GOOD, &[]).unwrap_or_else(|faults| panic!("{faults}"));
    assert_eq!(plan.name, "digits");
    assert_eq!(plan.params["ds"], "2026-12-01");
    assert!(plan.store.as_str().ends_with("/out"), "{}", plan.store.as_str());
    assert!(plan.source("digits").unwrap().location.as_str().ends_with("/data/day=2026-12-01"));
    assert_eq!(plan.transforms[0].inputs, ["digits"]);
    let model = plan.model("small").unwrap();
    assert_eq!((model.train.epochs, model.partition.count, model.train.keep), (10, 8, Keep::Last));
    assert_eq!(plan.embeddings[0].from, "bright");
    assert_eq!(plan.spec_hash.len(), 64);
}

/// Replaces `from` by each left side and compares the faults with the right side.
#[track_caller]
fn check_all(from: &str, cases: &[(&str, &str)]) {
    for (to, expected) in cases {
        check(&[(from, to)], expected);
    }
}

#[test]
fn three_planted_faults_are_shown_at_once() {
    let text = GOOD
        .replace("latent:", "lattent:")
        .replace("FROM digits", "FROM digit")
        .replace("- column", "- colum: a\n        column");
    let faults = read(text, &[]).unwrap_err();
    let expected = "\
error: there is no source or transform `digit`
  --> p.yaml:16:12
   |
16 |       FROM digit
   |            ^^^^^
   |
   = help: did you mean `digits`?

error: unknown key `colum`
  --> p.yaml:22:9
   |
22 |       - colum: a
   |         ^^^^^
   |
   = help: `column` is given already: remove this one

error: unknown key `lattent`
  --> p.yaml:25:5
   |
25 |     lattent: 8
   |     ^^^^^^^
   |
   = help: did you mean `latent`?

3 faults in p.yaml";
    assert_eq!(faults.to_string(), expected);
    assert!(faults.render(true).contains("\u{1b}["));
}

#[test]
fn keys() {
    check_all(
        "latent: 8",
        &[
            ("lattent: 8", "24:5 [lattent] unknown key `lattent` | did you mean `latent`?"),
            (
                "lattent: x",
                "24:5 [lattent] unknown key `lattent` | did you mean `latent`?\n24:14 [x] expected a whole number, 0 or more, found `x`",
            ),
            (
                "latent: 8\n    lattent: 9",
                "25:5 [lattent] unknown key `lattent` | `latent` is given already: remove this one",
            ),
            (
                "latent: 8\n    latent: 9",
                "25:5 [latent] key `latent` is given twice | it stands in line 24 already: keep one of them",
            ),
            ("", "19:3 [small] key `latent` is missing"),
        ],
    );
    check(
        &[("version: 1\nname: digits", "vershion: 2")],
        "1:1 [] key `name` is missing\n\
         1:1 [vershion] unknown key `vershion` | did you mean `version`?\n\
         1:11 [2] this version of the format is not known | write `version: 1`",
    );
    check(&[("models:", "modells:")], "18:1 [modells] unknown key `modells` | did you mean `models`?");
    check(
        &[("executors: 2", "cores: 2")],
        "8:3 [cores] unknown key `cores` | the keys here are `executors`, `launcher`, `min_executors`, `max_executors`, `device`, `memory` and `seed`",
    );
    check(
        &[("  ds: {", "  ds: { tpye: date,")],
        "5:9 [tpye] unknown key `tpye` | `type` is given already: remove this one",
    );
}

#[test]
fn a_flood_of_faults_is_cut() {
    let many: Vec<_> = (0..60).map(|number| format!("  unheard_of_{number}: 1\n")).collect();
    let many = many.concat();
    let faults = read(GOOD.replace("run:\n", &format!("run:\n{many}")), &[]).unwrap_err();
    assert_eq!(faults.faults.len(), 60);
    let shown = faults.to_string();
    assert_eq!(shown.matches("error: ").count(), 50);
    assert!(shown.ends_with("60 faults in p.yaml, the first of them shown"), "{shown}");
}

#[test]
fn types() {
    check_all(
        "latent: 8",
        &[
            ("latent: eight", "24:13 [eight] expected a whole number, 0 or more, found `eight`"),
            ("latent: -1", "24:13 [-1] expected a whole number, 0 or more, found `-1`"),
            ("latent: 8.0", "24:13 [8.0] expected a whole number, 0 or more, found `8.0`"),
            ("latent: \"8\"", "24:13 [\"8\"] expected a whole number, 0 or more, found `8`"),
            ("latent:", "24:5 [latent] expected a whole number, 0 or more, found nothing"),
            ("latent: [8]", "24:13 [[8]] expected a whole number, 0 or more, found a list"),
            ("latent: 0x10", "no fault"),
            ("latent: 8\n    tied_weights: maybe", "25:19 [maybe] expected `true` or `false`, found `maybe`"),
        ],
    );
    check_all(
        "executors: 2",
        &[
            (
                "executors: 4294967296",
                "8:14 [4294967296] expected a whole number from 0 to 4294967295, found `4294967296`",
            ),
            (
                "memory: 512",
                "8:11 [512] expected a size, found `512` | write a number and a unit, such as `512MiB` or `4GiB`",
            ),
        ],
    );
    check(&[("name: digits", "name: 12")], "2:7 [12] expected text, found `12` | put it in quotes: \"12\"");
    check(&[("key: [id]", "key: id")], "30:10 [id] expected a list, found `id` | write `[id]`");
    check(&[("key: [id]", "key: [id, 3]")], "30:15 [3] expected text, found `3` | put it in quotes: \"3\"");
    let digits = "  digits:\n    path: data/day=${ds}";
    check(&[(digits, "  digits: 3")], "10:11 [3] expected keys and values, found `3`");
    check(&[("train:\n      epochs: ${rows}", "train:")], "25:5 [train] expected keys and values, found nothing");
}

#[test]
fn choices() {
    let scales = "expected `none`, `min_max`, `standard`, `robust` or `divide`, found";
    check_all(
        "scale: { divide: 255 }",
        &[
            ("scale: minmax", &format!("23:16 [minmax] {scales} `minmax` | did you mean `min_max`?")),
            ("scale: { divid: 2 }", &format!("23:18 [divid] {scales} `divid` | did you mean `divide`?")),
            ("scale: 3", &format!("23:16 [3] {scales} `3`")),
            ("scale: [robust]", &format!("23:16 [[robust]] {scales} a list")),
            ("scale: divide", "23:16 [divide] `divide` needs a value | write `{ divide: ... }`"),
            ("scale: { none: 3 }", "23:24 [3] `none` takes no value | write `none` alone"),
            ("scale: { divide: x }", "23:26 [x] expected a number, found `x`"),
            ("scale: { divide: 0 }", "23:26 [0] cannot divide by this | give another number than 0"),
        ],
    );
    check_all(
        "epochs: ${rows}",
        &[
            ("schedule: step", "26:17 [step] `step` needs a value | write `{ step: ... }`"),
            (
                "schedule: cosin",
                "26:17 [cosin] expected `constant`, `step` or `cosine`, found `cosin` | did you mean `cosine`?",
            ),
            ("schedule: { step: { epochs: 3 } }", "26:19 [step] key `factor` is missing"),
            (
                "schedule: { step: { epochs: 0, factor: -1, fakt: 2 } }",
                "26:35 [0] expected at least one epoch\n26:46 [-1] expected a number above 0\n\
                 26:50 [fakt] unknown key `fakt` | the keys here are `epochs` and `factor`",
            ),
            (
                "schedule: { cosine: { warmup_epochs: 10, floor: 2 } }",
                "26:44 [10] the rise must end before the training: fewer than 10 epochs\n\
                 26:55 [2] expected a fraction from 0 to 1",
            ),
            ("optimizer: adm", "26:18 [adm] expected `sgd`, `adam` or `adamw`, found `adm` | did you mean `adam`?"),
        ],
    );
}

#[test]
fn yaml() {
    check_all(
        "epochs: ${rows}",
        &[
            (
                "{ epochs: ${rows} }",
                "26:18 [{] this is not YAML: while parsing a flow mapping, did not find expected ',' or '}' \
                 | inside { } and [ ], put \"${...}\" in quotes",
            ),
            ("{ epochs: \"${rows}\" }", "no fault"),
            ("\tepochs: 3", "26:8 [epochs] tabs cannot indent YAML | use blanks"),
            (
                "epochs: &a 3\n      batch: *a",
                "26:15 [&a 3] anchors are not part of this format | write the plain value\n\
                 27:14 [*a] aliases are not part of this format | write the value out, or use a parameter",
            ),
            ("epochs: !!int 3", "26:15 [!!int 3] tags are not part of this format | write the plain value"),
        ],
    );
    let documents =
        "27:1 [---] a second document starts here | a pipeline file is one document: give each its own file";
    check(&[("embeddings:", "---\nembeddings:")], documents);
    for (text, expected) in [
        ("", "1:1 [] the file is empty | `emberflow init` writes one to start from"),
        ("# nothing\n", "1:1 [] the file is empty | `emberflow init` writes one to start from"),
        ("- a\n- b\n", "1:1 [- a] a pipeline file consists of keys and values"),
    ] {
        assert_eq!(brief(&read(text, &[]).unwrap_err()), expected);
    }
    let deep = "a: ".to_owned() + &"[".repeat(100);
    assert!(brief(&read(deep, &[]).unwrap_err()).ends_with("nested too deeply"));
    let latin = read(b"version: 1\nname: caf\xe9", &[]).unwrap_err();
    assert_eq!(brief(&latin), "1:1 [] line 2 is not UTF-8 text");
    let large = read(" ".repeat((4 << 20) + 1), &[]).unwrap_err();
    assert_eq!(brief(&large), "1:1 [] larger than 4MiB, surely another file");
    let missing = PipelinePlan::read(Path::new("none.yaml"), &[], Path::new("/")).unwrap_err();
    assert_eq!(missing.to_string(), "error: no such file\n--> none.yaml\n\n1 fault in none.yaml");
}

#[test]
fn wide_characters_and_line_ends_shift_no_mark() {
    check(
        &[("path: data/day=${ds}", "path: data/ü/${ds}/世界\n    # ünïcödé 世界\n    \"fromat\": csv")],
        "13:5 [\"fromat\"] unknown key `fromat` | did you mean `format`?",
    );
    let text = GOOD.replace("name: digits", "# 世界").replace("latent", "lattent");
    let expected = "1:1 [] key `name` is missing\n24:5 [lattent] unknown key `lattent` | did you mean `latent`?";
    assert_eq!(brief(&read(&text, &[]).unwrap_err()), expected);
    assert_eq!(brief(&read(text.replace('\n', "\r\n"), &[]).unwrap_err()), expected);
    let marked = read(format!("\u{feff}{text}"), &[]).unwrap_err();
    assert_eq!(brief(&marked), expected);
}

#[test]
fn parameters() {
    let form = "write a date moved by whole days, such as `${ds-1d}` or `${ds+7d}`";
    check_all(
        "path: data/day=${ds}",
        &[
            ("path: ${ds-1d}/${ds+40d}/$${x}", "no fault"),
            ("path: ${dss}", "11:11 [${dss}] there is no parameter `dss` | did you mean `ds`?"),
            ("path: a/${ds", "11:13 [${] `${` is not closed | close it with `}`, or write `$${` for a plain `${`"),
            ("path: \"a\\t${ds-1}\"", &format!("11:11 [\"a\\t${{ds-1}}\"] `-1` is no number of days | {form}")),
            (
                "path: ${rows-1d}",
                &format!("11:11 [${{rows-1d}}] `rows` is not a date and cannot be moved by `-1d` | {form}"),
            ),
            ("path: ${ds+999999999d}", "11:11 [${ds+999999999d}] `ds+999999999d` is beyond the calendar"),
            ("path: ${rows}", "11:11 [${rows}] expected text, found `${rows}`"),
        ],
    );
    let ds = "{ type: date, default: 2026-12-01 }";
    check(&[(ds, "{ type: date }")], "5:3 [ds] parameter `ds` has no value | give one: --param ds=...");
    check(
        &[(ds, "{ type: date, default: 2026-02-29 }")],
        "5:30 [2026-02-29] expected a day of the calendar, YYYY-MM-DD, found `2026-02-29`",
    );
    check(
        &[(ds, "{ type: day, default: 2026-12-01 }")],
        "5:15 [day] expected `string`, `int`, `float`, `bool`, `date` or `path`, found `day`",
    );
    check(&[(ds, "{ type: date, default: \"${rows}\" }")], "5:30 [\"${rows}\"] a default cannot refer to a parameter");
    check(&[("default: 10", "default: ten")], "6:31 [ten] expected a whole number, found `ten`");
    let faults = read(GOOD, &[("dss", "2026-01-01"), ("rows", "1.5")]).unwrap_err();
    assert_eq!(
        brief(&faults),
        "command line:1:1 [] --param rows: expected a whole number, found `1.5`\n\
         command line:1:1 [] --param dss: the file has no such parameter | did you mean `ds`?"
    );
}

#[test]
fn paths_count_from_the_file_and_overrides_from_the_working_directory() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("pipelines")).unwrap();
    let text =
        GOOD.replace("ds: {", "out: { type: path, default: ../out }\n  ds: {").replace("store: out", "store: ${out}");
    std::fs::write(root.path().join("pipelines/p.yaml"), text).unwrap();
    let read = |params: &[(&str, &str)]| {
        let params: Vec<_> = params.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        PipelinePlan::read(Path::new("pipelines/p.yaml"), &params, root.path()).unwrap()
    };
    let local = |store: &str| emberflow::storage::Location::parse(store, root.path()).unwrap();
    assert_eq!(read(&[]).store, local("out"));
    assert_eq!(read(&[("out", "results")]).store, local("results"));
    assert_eq!(read(&[("out", "hdfs://nn:9000/r")]).store, local("hdfs://nn:9000/r"));
    assert_eq!(
        read(&[("ds", "2026-03-01")]).source("digits").unwrap().location,
        local("pipelines/data/day=2026-03-01")
    );
    assert_eq!(read(&[("rows", "3")]).models[0].train.epochs, 3);
}

#[test]
fn the_hash_follows_the_meaning() {
    let folder = tempfile::tempdir().unwrap();
    let hash = |text: String| {
        std::fs::write(folder.path().join("p.yaml"), text).unwrap();
        PipelinePlan::read(Path::new("p.yaml"), &[], folder.path()).unwrap().spec_hash
    };
    let good = hash(GOOD.to_owned());
    for same in [
        ("executors: 2", "executors: 4"),
        ("version: 1", "version: 1 # same"),
        ("${rows}", "10"),
        ("path: data", "path: ./data"),
    ] {
        assert_eq!(hash(GOOD.replace(same.0, same.1)), good, "{same:?}");
    }
    for other in [
        ("executors: 2", "executors: 16"),
        ("default: 10", "default: 11"),
        ("label > 0", "label > 1"),
        ("store: out", "store: o"),
    ] {
        assert_ne!(hash(GOOD.replace(other.0, other.1)), good, "{other:?}");
    }
}

#[test]
fn names_and_references() {
    let name = "start with a lower-case letter, go on with lower-case letters, digits and `_`";
    check(&[("name: digits", "name: Digits")], &format!("2:7 [Digits] `Digits` is no name | {name}"));
    check(&[("  small:", "  a-b:"), ("model: small", "model: a-b")], &format!("19:3 [a-b] `a-b` is no name | {name}"));
    check(&[("  vectors:", "  epochs:")], "28:3 [epochs] `epochs` is a table of every session | choose another name");
    check(
        &[("  vectors:", "  bright:")],
        "28:3 [bright] `bright` is also the name of one of the transforms | sources, transforms and embeddings share one set of names",
    );
    check(
        &[("from: bright", "from: brigt")],
        "20:11 [brigt] there is no source or transform `brigt` | did you mean `bright`?",
    );
    check(&[("model: small", "model: smal")], "29:12 [smal] there is no model `smal` | did you mean `small`?");
    check(
        &[("model: small", "model: small\n    from: elsewhere")],
        "30:11 [elsewhere] there is no source or transform `elsewhere` | name it under `sources` or `transforms`",
    );
    check(
        &[("key: [id]", "key: [id, embedding]\n    columns: [id]\n    keep_versions: 0")],
        "30:15 [embedding] `embedding` is a column that embedding tables have anyway | rename the column in a transform\n\
         31:15 [id] column `id` is named twice\n\
         32:20 [0] at least one version is kept",
    );
}

#[test]
fn sources_and_settings() {
    check_all(
        "path: data/day=${ds}",
        &[
            ("path: ''", "11:11 [''] expected a path or URL, found nothing"),
            (
                "path: x\n    columns: { id: BIGINT, b: WAT, c: \"DECIMAL(10,2)\", d: INT INT }\n    csv: { delimiter: é }",
                "12:31 [WAT] `WAT` is no SQL type of a column | such as BIGINT, DOUBLE, VARCHAR, DATE, TIMESTAMP, BOOLEAN or DECIMAL(10,2)\n\
                 12:59 [INT INT] `INT INT` is no SQL type of a column | such as BIGINT, DOUBLE, VARCHAR, DATE, TIMESTAMP, BOOLEAN or DECIMAL(10,2)\n\
                 13:23 [é] this character cannot separate fields | use one such as `,` `;` `|` or \"\\t\"",
            ),
            ("path: x\n    csv: { delimiter: ;; }", "12:23 [;;] expected one character, found `;;`"),
            (
                "path: x\n    format: parquet\n    csv: { header: false }",
                "13:10 [{ header: false }] `csv` is for CSV files | remove it, or write `format: csv`",
            ),
        ],
    );
    let sizes = "write a number and a unit, such as `512MiB` or `4GiB`";
    check_all(
        "executors: 2",
        &[
            ("memory: 1.5GB", "no fault"),
            ("memory: \"1073741824\"", &format!("8:11 [\"1073741824\"] `1073741824` is no size | {sizes}")),
            ("memory: 1KB", "8:11 [1KB] too little memory to hold a few batches | give it at least 64MiB"),
            ("executors: 0", "8:14 [0] expected 1 to 1024 executors"),
            ("executors: auto", "no fault"),
            ("executors: many", "8:14 [many] expected a whole number from 0 to 4294967295, found `many`"),
            ("device: gpu", "8:11 [gpu] expected `cpu`, `wgpu` or `cuda`, found `gpu` | did you mean `cpu`?"),
        ],
    );
}

#[test]
fn models() {
    let features = "features:\n      - column: pixels\n        scale: { divide: 255 }";
    check(&[(features, "features: []")], "21:15 [[]] a model needs at least one feature | such as `- column: price`");
    check(
        &[(
            features,
            "features:\n      - column: p*\n      - scale: none\n      - { column: a, columns: [b] }\n      - { column: a, indicator: true }",
        )],
        "22:17 [p*] `column` names one column, a pattern may be several | write `columns: [\"p*\"]`\n\
         23:9 [scale: none] a feature needs its column | give `column` or `columns`\n\
         24:31 [[b]] give `column` or `columns`, not both\n\
         25:33 [true] no row has a missing value here to indicate | say what stands in for it: `missing: mean`, `median` or `{ constant: 0 }`",
    );
    check_all(
        "latent: 8",
        &[
            (
                "latent: 0\n    hidden: [0, 16]\n    partition: { by: hash }",
                "24:13 [0] expected a width from 1 to 1048576\n25:14 [0] expected a width from 1 to 1048576\n\
                 26:16 [{ by: hash }] `by: hash` needs the columns to hash | such as `columns: [user_id]`",
            ),
            (
                "latent: 8\n    partition: { columns: [a], count: 0 }",
                "25:27 [[a]] only `by: hash` takes columns | add `by: hash`\n25:39 [0] expected 1 to 4096 partitions",
            ),
        ],
    );
    check(
        &[("epochs: ${rows}", "loss: binary_cross_entropy"), ("latent: 8", "latent: 8\n    output_activation: relu")],
        "25:24 [relu] `binary_cross_entropy` needs a reconstruction between 0 and 1 | write `sigmoid`, or leave it out",
    );
    check_all(
        "epochs: ${rows}",
        &[
            (
                "epochs: 0\n      batch: 0\n      learning_rate: 0\n      momentum: 0.5\n      validation: 1\n      clip_norm: 0",
                "26:15 [0] expected at least one epoch\n27:14 [0] expected at least one row\n28:22 [0] expected a number above 0\n\
                 29:17 [0.5] `momentum` is for `optimizer: sgd` | Adam has `betas`\n\
                 30:19 [1] expected a fraction from 0 to 0.9 | 0.1 holds out a tenth\n\
                 31:18 [0] expected a number above 0 | leave it out for no bound",
            ),
            (
                "optimizer: sgd\n      betas: [0.9, 0.99]\n      epsilon: 1\n      momentum: 1",
                "27:14 [[0.9, 0.99]] `betas` is for `optimizer: adam` and `adamw` | sgd has `momentum`\n\
                 28:16 [1] `epsilon` is for `optimizer: adam` and `adamw`\n29:17 [1] expected a number from 0, below 1",
            ),
            ("betas: [0.9]", "26:14 [[0.9]] expected a list of two numbers, found a list"),
            (
                "keep: best",
                "26:13 [best] `best` is measured on rows held out, and none are | hold rows out: `validation: 0.1`",
            ),
            (
                "sync: { parameter_server: { servers: 0, mode: async, staleness: 3 } }",
                "26:44 [0] expected 1 to 64 servers\n\
                 26:71 [3] `staleness` is for `mode: bounded` | leave it out, or add that",
            ),
            (
                "sync: { parameter_server: { mode: bounded, staleness: 17 } }\n      compression: { top_k: 0.1 }",
                "26:61 [17] expected 0 to 16 steps\n\
                 27:20 [{ top_k: 0.1 }] `top_k` is for `sync: all_reduce` | use `compression: bf16`, or leave it out",
            ),
            (
                "early_stopping: { patience: 0, min_delta: -1 }",
                "26:35 [0] expected at least one epoch\n26:49 [-1] expected 0 or more",
            ),
        ],
    );
}

#[test]
fn queries() {
    let only = "a transform is one SELECT: it cannot change anything | start with SELECT or WITH";
    check_all(
        "SELECT id, pixels\n      FROM digits\n      WHERE label > 0",
        &[
            ("SELECT id\n      FRM digits", "16:11 [digits] SQL: expected end of statement, found `digits`"),
            ("SELECT id FROM digits WHERE", "15:33 [E] SQL: expected an expression, found the end"),
            ("SELECT 'abc", "15:14 ['] SQL: Unterminated string literal"),
            ("SELECT 1; SELECT 2", "15:7 [SELECT 1; SELECT 2] a transform is one query, and here are several"),
            ("-- nothing", "15:7 [-- nothing] expected a query, found nothing"),
            ("DROP TABLE digits", &format!("15:7 [DROP TABLE digits] {only}")),
            ("COPY digits TO 'x'", &format!("15:7 [COPY digits TO 'x'] {only}")),
            ("SELECT * INTO x FROM digits", &format!("15:7 [SELECT] {only}")),
            ("WITH x AS (DELETE FROM digits) SELECT 1", &format!("15:18 [DELETE] {only}")),
            (
                "\n      -- 世界 ${rows}\n\n      SELECT 'é${ds}' FROM\n        digit",
                "19:9 [digit] there is no source or transform `digit` | did you mean `digits`?",
            ),
            ("SELECT '${dss}' FROM digits", "15:15 [${dss}] there is no parameter `dss` | did you mean `ds`?"),
            ("WITH d AS (SELECT 1 AS x) SELECT x FROM d, range(3), digits", "no fault"),
            (
                "SELECT * FROM Digits",
                "15:21 [Digits] there is no source or transform `Digits` | did you mean `digits`?",
            ),
            (
                "SELECT * FROM a.digits",
                "15:21 [a] `a.digits` is no table of this file | sources and transforms have plain names",
            ),
            (
                "SELECT * FROM bright",
                "13:3 [bright] transforms feed one another: bright → bright | a transform reads what is made before it",
            ),
        ],
    );
    let sql = "sql: |\n      SELECT id, pixels\n      FROM digits\n      WHERE label > 0";
    check_all(
        sql,
        &[
            (
                "sql: SELECT 1 FROM digit",
                "14:24 [digit] there is no source or transform `digit` | did you mean `digits`?",
            ),
            (
                "sql: \"SELECT '\\u00e9' FROM\\n digit\"",
                "14:10 [\"SELECT '\\u00e9' FROM\\n digit\"] there is no source or transform `digit` | did you mean `digits`?",
            ),
            (
                "sql: >\n      SELECT 1\n      FROM digit",
                "15:7 [SELECT 1] there is no source or transform `digit` | did you mean `digits`?",
            ),
            ("file: missing.sql", "14:11 [missing.sql] missing.sql: no such file"),
            ("{}", "14:5 [{}] a transform needs its query | give `sql` or `file`"),
            ("sql: SELECT 1\n    file: a.sql", "15:11 [a.sql] give `sql` or `file`, not both"),
        ],
    );
    check(
        &[("bright:\n", "a: { sql: SELECT * FROM b }\n  b: { sql: SELECT * FROM a }\n  bright:\n")],
        "13:3 [a] transforms feed one another: a → b → a | a transform reads what is made before it",
    );
}

#[test]
fn a_fault_in_a_sql_file_names_that_file() {
    let root = tempfile::tempdir().unwrap();
    for folder in ["pipelines", "sql"] {
        std::fs::create_dir(root.path().join(folder)).unwrap();
    }
    let sql = "sql: |\n      SELECT id, pixels\n      FROM digits\n      WHERE label > 0";
    std::fs::write(root.path().join("pipelines/p.yaml"), GOOD.replace(sql, "file: ../sql/b.sql")).unwrap();
    let faults = |sql: &str| {
        std::fs::write(root.path().join("sql/b.sql"), sql).unwrap();
        PipelinePlan::read(Path::new("pipelines/p.yaml"), &[], root.path()).map_err(|faults| brief(&faults))
    };
    assert_eq!(
        faults("SELECT id, pixels FROM digits WHERE day = '${ds}';\n").unwrap().transforms[0].sql,
        "SELECT id, pixels FROM digits WHERE day = '2026-12-01'"
    );
    assert_eq!(
        faults("-- é\nSELECT '${ds}'\nFROM digit").unwrap_err(),
        "sql/b.sql:3:6 [digit] there is no source or transform `digit` | did you mean `digits`?"
    );
    assert_eq!(
        faults("SELECT ${x} FROM y").unwrap_err(),
        "sql/b.sql:1:8 [${x}] there is no parameter `x` | declare it under `params`, or write `$${` for a plain `${`"
    );
}

#[test]
fn faults_found_later_point_into_the_file() {
    let plan = read(GOOD, &[]).unwrap();
    let fault = |path: &[&str]| brief(&plan.origin.fault(path, "m".to_owned(), None));
    assert_eq!(fault(&["models", "small", "features", "0", "column"]), "22:17 [pixels] m");
    assert_eq!(fault(&["models", "small", "features", "0", "columns", "3"]), "22:9 [column] m");
    assert_eq!(fault(&["models", "small"]), "19:3 [small] m");
    assert_eq!(fault(&["sources", "digits", "csv", "null"]), "10:3 [digits] m");
    assert_eq!(fault(&[]), "1:1 [version] m");
    assert_eq!(plan.origin.file(), "p.yaml");
}

#[test]
fn transforms_come_after_their_inputs() {
    let chain =
        "c: { sql: SELECT * FROM bright }\n  a: { sql: \"SELECT * FROM c JOIN digits USING (id)\" }\n  bright:\n";
    let plan = read(GOOD.replace("bright:\n", chain), &[]).unwrap();
    let names: Vec<_> = plan.transforms.iter().map(|transform| transform.name.as_str()).collect();
    assert_eq!(names, ["bright", "c", "a"]);
    assert_eq!(plan.transforms[2].inputs, ["c", "digits"]);
}

fn shipped() -> impl Iterator<Item = std::path::PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
}

#[test]
fn shipped_pipelines_have_no_faults() {
    let mut names = Vec::new();
    for file in shipped() {
        let plan = PipelinePlan::read(&file, &[], Path::new("/")).unwrap_or_else(|faults| panic!("{faults}"));
        names.push(plan.name);
    }
    names.sort();
    assert_eq!(names, ["mnist", "nsl_kdd"]);
}

/// The transform's SQL fits the file's header, and gives every row the same id each time.
#[tokio::test]
async fn the_nsl_kdd_transform_fits_its_data() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let plan = PipelinePlan::read(&root.join("pipelines/nsl_kdd.yaml"), &[], root).unwrap();
    let session = datafusion::prelude::SessionContext::new();
    let data = root.join("pipelines/data/nsl-kdd-test.csv").display().to_string();
    session.register_csv("raw_connections", data, datafusion::prelude::CsvReadOptions::new()).await.unwrap();
    let table = session.sql(&plan.transforms[0].sql).await.unwrap();
    let names: Vec<_> = table.schema().fields().iter().map(|field| field.name().clone()).collect();
    for pattern in plan.models[0].features.iter().flat_map(|feature| &feature.columns) {
        let part = pattern.trim_matches('*');
        assert!(names.iter().any(|name| name.contains(part)), "{pattern} matches none of {names:?}");
    }
    let first = table.filter(datafusion::prelude::col("id").eq(datafusion::prelude::lit(1))).unwrap();
    let row = |batches: Vec<arrow::array::RecordBatch>| {
        arrow::util::pretty::pretty_format_batches(&batches).unwrap().to_string()
    };
    let once = row(first.clone().collect().await.unwrap());
    assert_eq!(once, row(first.collect().await.unwrap()));
    assert_eq!(once.lines().count(), 5, "{once}");
}

#[test]
fn the_schema_is_the_one_that_editors_are_given() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pipeline.schema.json");
    let shipped: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!(shipped, json_schema(), "run `emberflow schema > docs/pipeline.schema.json`");
}

#[test]
fn shipped_pipelines_fit_the_schema() {
    let schema = json_schema();
    assert_eq!(schema["title"], "Emberflow pipeline");
    for file in shipped() {
        let text = std::fs::read_to_string(&file).unwrap();
        let value = yaml_value(&saphyr::Yaml::load_from_str(&text).unwrap()[0]);
        assert_eq!(fits(&value, &schema, &schema), Ok(()), "{}", file.display());
    }
    let wrong = serde_json::json!({ "version": 1, "name": "x", "store": "x", "sources": { "a": { "pth": "x" } } });
    assert!(fits(&wrong, &schema, &schema).is_err());
}

fn yaml_value(yaml: &saphyr::Yaml<'_>) -> Value {
    match yaml {
        saphyr::Yaml::Value(saphyr::Scalar::Integer(number)) => Value::from(*number),
        saphyr::Yaml::Value(saphyr::Scalar::FloatingPoint(number)) => Value::from(number.into_inner()),
        saphyr::Yaml::Value(saphyr::Scalar::Boolean(flag)) => Value::from(*flag),
        saphyr::Yaml::Value(saphyr::Scalar::String(text)) => Value::from(text.as_ref()),
        saphyr::Yaml::Sequence(items) => items.iter().map(yaml_value).collect(),
        saphyr::Yaml::Mapping(entries) => Value::Object(
            entries.iter().map(|(key, value)| (key.as_str().unwrap().to_owned(), yaml_value(value))).collect(),
        ),
        _ => Value::Null,
    }
}

/// As much of JSON Schema as the schema uses.
fn fits(value: &Value, schema: &Value, root: &Value) -> Result<(), String> {
    let wrong = || Err(format!("{value} does not fit {schema}"));
    if let Some(reference) = schema["$ref"].as_str() {
        fits(value, &root["$defs"][reference.strip_prefix("#/$defs/").unwrap()], root)?;
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(options) = schema[key].as_array()
            && !options.iter().any(|option| fits(value, option, root).is_ok())
        {
            return wrong();
        }
    }
    let is = |kind: &Value| match kind.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        _ => value.is_null(),
    };
    let typed = match &schema["type"] {
        Value::Null => true,
        Value::Array(kinds) => kinds.iter().any(is),
        kind => is(kind),
    };
    let constant = schema.get("const").is_none_or(|expected| expected == value);
    let listed = schema["enum"].as_array().is_none_or(|choices| choices.contains(value));
    let parameter = schema.get("pattern").is_none() || value.as_str().is_some_and(|text| text.contains("${"));
    if !(typed && constant && listed && parameter) {
        return wrong();
    }
    for required in schema["required"].as_array().into_iter().flatten() {
        value.get(required.as_str().unwrap()).ok_or_else(|| format!("{required} is missing"))?;
    }
    for (key, child) in value.as_object().into_iter().flatten() {
        match (schema["properties"].get(key), &schema["additionalProperties"]) {
            (None, Value::Bool(false)) => return Err(format!("unknown key {key}")),
            (None, Value::Null | Value::Bool(true)) => {}
            (Some(property), _) | (None, property) => fits(child, property, root)?,
        }
    }
    value.as_array().into_iter().flatten().try_for_each(|item| fits(item, &schema["items"], root))
}

proptest! {
    /// Whatever the text, reading ends in a plan or in faults that can be shown.
    #[test]
    fn no_text_panics(text in "(?s).{0,80}") {
        if let Err(faults) = read(&text, &[]) {
            prop_assert!(!faults.faults.is_empty());
            prop_assert!(!faults.to_string().is_empty());
        }
    }

    /// The same for text that looks like YAML.
    #[test]
    fn no_yaml_panics(parts in prop::collection::vec("[a-z]{1,3}|: |\n|\n  |- |[|>]\n  |[\\[\\]{},&*!#'\"%@`?$\t\r]|é|\\$\\{", 0..40)) {
        if let Err(faults) = read(parts.concat(), &[]) {
            prop_assert!(!faults.to_string().is_empty());
        }
    }

    /// The same for a good file with a part of it gone or replaced.
    #[test]
    fn no_damage_panics(start in 0..GOOD.len(), length in 0..40usize, instead in "[a-z0-9:\\[\\]{}$ \n'é-]{0,6}") {
        let end = (start + length).min(GOOD.len());
        let text = format!("{}{instead}{}", &GOOD[..start], &GOOD[end..]);
        if let Err(faults) = read(text, &[]) {
            prop_assert!(!faults.faults.is_empty());
            prop_assert!(faults.faults.iter().all(|fault| faults.text.get(fault.span.clone()).is_some()));
            prop_assert!(!faults.to_string().is_empty());
        }
    }
}
