//! Integration tests of `storage`.
