//! SQL of transforms, checked as far as text allows: one query, nothing but reading, and
//! which tables it reads. Columns and types show once the data is known.

use std::ops::{ControlFlow, Range};

use datafusion::{
    error::DataFusionError,
    sql::{
        parser::{DFParserBuilder, Statement as DFStatement},
        resolve::resolve_table_references,
        sqlparser::{
            ast::{
                self, DataType, ExactNumberInfo, ObjectName, Query, Select, Spanned, Statement, TableFactor, Visit,
                Visitor,
            },
            dialect::GenericDialect,
            parser::{Parser, ParserError},
            tokenizer::Location,
        },
    },
};

/// A fault of a query: what is wrong, where in the query, and a hint.
pub(super) struct SqlFault {
    pub message: String,
    pub range: Range<usize>,
    pub help: Option<String>,
}

/// A table that a query reads, and where it names it first.
#[derive(Debug, PartialEq)]
pub(super) struct TableUse {
    pub name: String,
    pub range: Range<usize>,
}

/// The tables that a query reads, each once, in the order of the query.
pub(super) fn tables(sql: &str) -> Result<Vec<TableUse>, SqlFault> {
    let everything = first_line(sql);
    let refuse = |message: &str, range| SqlFault { message: message.to_owned(), range, help: None };
    let mut parser = DFParserBuilder::new(sql).build().map_err(|error| syntax(sql, &error))?;
    let statements = parser.parse_statements().map_err(|error| syntax(sql, &error))?;
    let mut statements = statements.into_iter();
    let statement = match (statements.next(), statements.next()) {
        (Some(statement), None) => statement,
        (None, _) => return Err(refuse("expected a query, found nothing", everything)),
        _ => return Err(refuse("a transform is one query, and here are several", everything)),
    };
    let DFStatement::Statement(inner) = &statement else {
        return Err(only_reads(everything));
    };
    if !matches!(**inner, Statement::Query(_)) {
        return Err(only_reads(everything));
    }
    let mut reader = Reader::default();
    if let ControlFlow::Break(location) = inner.visit(&mut reader) {
        return Err(only_reads(location.map_or(everything, |location| token(sql, location))));
    }
    let (read, _) = resolve_table_references(&statement, false).map_err(|error| syntax(sql, &error))?;
    let mut uses: Vec<TableUse> = Vec::new();
    for (name, location) in reader.relations {
        let range = token(sql, location);
        let plain = plain_name(&name);
        let is_read = |table: &str| read.iter().any(|reference| reference.table() == table);
        match plain {
            None => {
                return Err(SqlFault {
                    message: format!("`{name}` is no table of this file"),
                    range,
                    help: Some("sources and transforms have plain names".to_owned()),
                });
            }
            Some(plain) if is_read(&plain) && uses.iter().all(|table| table.name != plain) => {
                uses.push(TableUse { name: plain, range });
            }
            Some(_) => {}
        }
    }
    Ok(uses)
}

/// Whether this is a SQL type that columns can have.
pub(super) fn is_column_type(text: &str) -> bool {
    let Ok(mut parser) = Parser::new(&GenericDialect {}).try_with_sql(text) else { return false };
    let Ok(kind) = parser.parse_data_type() else { return false };
    let complete = parser.peek_token() == datafusion::sql::sqlparser::tokenizer::Token::EOF;
    complete && has_arrow_type(&kind)
}

/// The types that DataFusion turns into Arrow types.
fn has_arrow_type(kind: &DataType) -> bool {
    match kind {
        DataType::Boolean
        | DataType::Bool
        | DataType::TinyInt(_)
        | DataType::SmallInt(_)
        | DataType::Int2(_)
        | DataType::Int(_)
        | DataType::Integer(_)
        | DataType::Int4(_)
        | DataType::BigInt(_)
        | DataType::Int8(_)
        | DataType::TinyIntUnsigned(_)
        | DataType::SmallIntUnsigned(_)
        | DataType::Int2Unsigned(_)
        | DataType::IntUnsigned(_)
        | DataType::IntegerUnsigned(_)
        | DataType::Int4Unsigned(_)
        | DataType::BigIntUnsigned(_)
        | DataType::Int8Unsigned(_)
        | DataType::Varchar(None)
        | DataType::Char(_)
        | DataType::Text
        | DataType::String(_)
        | DataType::Float(_)
        | DataType::Real
        | DataType::Float4
        | DataType::Double(ExactNumberInfo::None)
        | DataType::DoublePrecision
        | DataType::Float8
        | DataType::Date
        | DataType::Bytea => true,
        DataType::Timestamp(precision, _) => matches!(precision, None | Some(0 | 3 | 6 | 9)),
        DataType::Time(None, zone) => matches!(zone, ast::TimezoneInfo::None | ast::TimezoneInfo::WithoutTimeZone),
        DataType::Decimal(digits) | DataType::Numeric(digits) => match *digits {
            ExactNumberInfo::None => true,
            ExactNumberInfo::Precision(precision) => (1..=76).contains(&precision),
            ExactNumberInfo::PrecisionAndScale(precision, scale) => {
                (1..=76).contains(&precision) && (0..=precision as i64).contains(&scale)
            }
        },
        _ => false,
    }
}

/// Collects the tables that are named, and stops at what does more than read.
#[derive(Default)]
struct Reader {
    relations: Vec<(ObjectName, Location)>,
    statements: usize,
    functions: Vec<Location>,
}

impl Visitor for Reader {
    type Break = Option<Location>;

    fn pre_visit_statement(&mut self, statement: &Statement) -> ControlFlow<Self::Break> {
        self.statements += 1;
        // The outermost statement is the query itself; within it stands `INSERT` and the like.
        if self.statements > 1 { ControlFlow::Break(start(statement.span())) } else { ControlFlow::Continue(()) }
    }

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<Self::Break> {
        match &*query.body {
            ast::SetExpr::Insert(inner)
            | ast::SetExpr::Update(inner)
            | ast::SetExpr::Delete(inner)
            | ast::SetExpr::Merge(inner) => ControlFlow::Break(start(inner.span())),
            _ => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_select(&mut self, select: &Select) -> ControlFlow<Self::Break> {
        match &select.into {
            Some(_) => ControlFlow::Break(start(select.span())),
            None => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_table_factor(&mut self, factor: &TableFactor) -> ControlFlow<Self::Break> {
        if let TableFactor::Table { name, args: Some(_), .. } = factor {
            self.functions.extend(start(name.span()));
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_relation(&mut self, relation: &ObjectName) -> ControlFlow<Self::Break> {
        if let Some(location) = start(relation.span())
            && !self.functions.contains(&location)
        {
            self.relations.push((relation.clone(), location));
        }
        ControlFlow::Continue(())
    }
}

/// A name without schema, as it is written: the engine changes no letters either.
fn plain_name(name: &ObjectName) -> Option<String> {
    match name.0.as_slice() {
        [part] => part.as_ident().map(|ident| ident.value.clone()),
        _ => None,
    }
}

fn start(span: datafusion::sql::sqlparser::tokenizer::Span) -> Option<Location> {
    (span.start.line > 0).then_some(span.start)
}

fn only_reads(range: Range<usize>) -> SqlFault {
    SqlFault {
        message: "a transform is one SELECT: it cannot change anything".to_owned(),
        range,
        help: Some("start with SELECT or WITH".to_owned()),
    }
}

/// The parser's complaint, and the token that it means.
fn syntax(sql: &str, error: &DataFusionError) -> SqlFault {
    let message = match error.find_root() {
        DataFusionError::SQL(error, _) => match &**error {
            ParserError::TokenizerError(message) | ParserError::ParserError(message) => message.clone(),
            ParserError::RecursionLimitExceeded => "nested too deeply".to_owned(),
        },
        other => other.strip_backtrace(),
    };
    let (message, location) = match message.rsplit_once(" at Line: ") {
        Some((message, place)) => (message, place.split_once(", Column: ")),
        None => (message.as_str(), None),
    };
    let location = location.and_then(|(line, column)| {
        let column: String = column.chars().take_while(char::is_ascii_digit).collect();
        Some(Location::new(line.parse().ok()?, column.parse().ok()?))
    });
    let range = match location {
        Some(location) => token(sql, location),
        // Without a place it is the end of the query that surprised.
        None if message.contains("EOF") => end(sql),
        None => first_line(sql),
    };
    let message = match message.strip_prefix("Expected: ").and_then(|rest| rest.split_once(", found: ")) {
        Some((expected, "EOF")) => format!("SQL: expected {expected}, found the end"),
        Some((expected, found)) => format!("SQL: expected {expected}, found `{found}`"),
        None => format!("SQL: {message}"),
    };
    SqlFault { message: message.replace('\n', " "), range, help: None }
}

/// The bytes of the word or sign at a line and column (both from 1, in characters).
fn token(sql: &str, location: Location) -> Range<usize> {
    let line_start = match location.line {
        0 | 1 => 0,
        line => sql.match_indices('\n').nth(line as usize - 2).map_or(sql.len(), |(at, _)| at + 1),
    };
    let column = (location.column as usize).max(1) - 1;
    let start = sql[line_start..].char_indices().nth(column).map_or(sql.len(), |(at, _)| line_start + at);
    let rest = &sql[start..];
    let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    match rest.chars().next() {
        None => end(sql),
        Some('"') => start..start + rest[1..].find('"').map_or(1, |close| close + 2),
        Some(first) => start..start + word.max(first.len_utf8()),
    }
}

/// The last character of a query.
fn end(sql: &str) -> Range<usize> {
    let text = sql.trim_end();
    let last = text.chars().next_back().map_or(0, char::len_utf8);
    text.len() - last..text.len()
}

/// The first line of a query that is not blank.
fn first_line(sql: &str) -> Range<usize> {
    let start = sql.len() - sql.trim_start().len();
    let line = sql[start..].lines().next().unwrap_or_default();
    start..start + line.trim_end().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_types() {
        for kind in ["BIGINT", "int", "DOUBLE", "DECIMAL(10,2)", "TIMESTAMP", "TIMESTAMP(3)", "VARCHAR", "BOOLEAN"] {
            assert!(is_column_type(kind), "{kind}");
        }
        for kind in
            ["", "WAT", "INT INT", "DECIMAL(99)", "DECIMAL(2,3)", "TIMESTAMP(2)", "UUID", "INT)", "'", "VARCHAR(3)"]
        {
            assert!(!is_column_type(kind), "{kind}");
        }
    }

    #[test]
    fn shipped_queries_are_queries() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 3);
        for file in files {
            let read = tables(&std::fs::read_to_string(&file).unwrap()).map_err(|fault| fault.message);
            assert!(read.is_ok_and(|tables| !tables.is_empty()), "{}", file.display());
        }
    }

    #[test]
    fn tables_in_order() {
        for (sql, expected) in [
            ("SELECT 1", &[][..]),
            ("SELECT * FROM b, A, \"C d\", b", &["b", "A", "C d"]),
            ("WITH x AS (SELECT * FROM y) SELECT * FROM x WHERE z IN (SELECT z FROM w)", &["y", "w"]),
            ("WITH t AS (SELECT * FROM t) SELECT * FROM t", &["t"]),
            ("SELECT * FROM a UNION ALL SELECT * FROM b;", &["a", "b"]),
            ("(SELECT * FROM a)", &["a"]),
            ("SELECT * FROM generate_series(1, 3)", &[]),
        ] {
            let found = tables(sql).map_err(|fault| fault.message).unwrap();
            let names: Vec<_> = found.iter().map(|table| table.name.as_str()).collect();
            assert_eq!(names, expected, "{sql}");
        }
    }
}
