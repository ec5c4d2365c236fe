//! The text of a pipeline file as a tree that knows where everything stands.

use super::faults::Faults;

/// Where the parts of a plan stand in its file.
#[derive(Clone, Debug)]
pub struct Origin {}

impl Origin {
    /// A fault at a path such as `["models", "autoencoder", "features", "0", "column"]`; where
    /// the file has no such node, its nearest ancestor is marked. For faults that only show
    /// once the data is known: an unknown column, an unusable type.
    pub fn fault(&self, path: &[&str], message: String, help: Option<String>) -> Faults {
        let _ = (path, message, help);
        unimplemented!()
    }

    /// The file's path, as the user wrote it.
    pub fn file(&self) -> &str {
        unimplemented!()
    }
}
