//! Integration tests of `hdfs`.
