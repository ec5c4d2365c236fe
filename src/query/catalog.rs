//! A store as a DataFusion catalog.

use std::sync::Arc;

use datafusion::{
    catalog::{CatalogProvider, MemoryCatalogProvider},
    execution::{memory_pool::FairSpillPool, runtime_env::RuntimeEnvBuilder},
    prelude::{SessionConfig, SessionContext},
};

use super::{QueryError, functions::register_functions, store_schema::StoreSchema};
use crate::{
    limits, runs,
    storage::{Location, Storage},
};

/// The catalog in which the tables stand.
pub(super) const CATALOG: &str = "emberflow";

/// The schema in which they stand.
pub(super) const SCHEMA: &str = "store";

/// A session in which
///
/// * each embedding table of the store stands under its name (latest version) and as
///   `"table@7"` (that version),
/// * each source of the latest successful run of each pipeline stands under its name, where no
///   embedding table has it,
/// * `runs`, `run_metrics` and `epochs` tell what ran,
/// * the distance functions of `register_functions` are there; unless `mix_models`, they
///   refuse to compare vectors of different models.
///
/// Names are taken as they are written, in queries as in pipeline files.
pub async fn open(storage: &Storage, store: &Location, mix_models: bool) -> Result<SessionContext, QueryError> {
    let pool = FairSpillPool::new(usize::try_from(limits::MEMORY_BYTES).unwrap_or(usize::MAX));
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(pool)).build_arc()?;
    let session = SessionContext::new_with_config_rt(session_config(), runtime);
    register_functions(&session, mix_models);
    let runs = runs::list_runs(storage, store).await?;
    let schema = StoreSchema::open(storage, store, &runs).await?;
    storage.register(&session, [store])?;
    for source in schema.sources() {
        // A source that cannot be reached matters to those only who query it.
        let _ = storage.register(&session, [source]);
    }
    let catalog = MemoryCatalogProvider::new();
    catalog.register_schema(SCHEMA, Arc::new(schema))?;
    session.register_catalog(CATALOG, Arc::new(catalog));
    Ok(session)
}

fn session_config() -> SessionConfig {
    let mut config = SessionConfig::new()
        .with_batch_size(limits::BATCH_ROWS)
        .with_information_schema(true)
        .with_create_default_catalog_and_schema(false)
        .with_default_catalog_and_schema(CATALOG, SCHEMA);
    let options = config.options_mut();
    options.sql_parser.enable_ident_normalization = false;
    options.sql_parser.map_string_types_to_utf8view = false;
    config
}
