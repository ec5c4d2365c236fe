//! Integration tests of `embed`.
