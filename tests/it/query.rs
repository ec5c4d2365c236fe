//! Integration tests of `query`.
