//! Integration tests of `data`.
