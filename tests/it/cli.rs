//! Integration tests of `cli`.
