//! Integration tests of `pipeline`.
