//! Every environment variable that Emberflow reads.

/// The settings file, where no `--config` names one.
pub const EMBERFLOW_CONF: &str = "EMBERFLOW_CONF";

/// The store that `sql`, `runs`, `status` and `models` look at, where no `--db` names one.
pub const EMBERFLOW_DB: &str = "EMBERFLOW_DB";

/// The token of a run, for the executors that it starts itself; others read it from the file of
/// the setting `token_file`.
pub const EMBERFLOW_TOKEN: &str = "EMBERFLOW_TOKEN";

/// What is logged: `error`, `warn` (default), `info`, `debug`, `trace`, or by module.
pub const EMBERFLOW_LOG: &str = "EMBERFLOW_LOG";

/// Any value: no colours (<https://no-color.org>).
pub const NO_COLOR: &str = "NO_COLOR";

/// Folder of core-site.xml and hdfs-site.xml.
pub const HADOOP_CONF_DIR: &str = "HADOOP_CONF_DIR";

/// Hadoop's installation; its `etc/hadoop` is used where `HADOOP_CONF_DIR` is not set.
pub const HADOOP_HOME: &str = "HADOOP_HOME";

/// The HDFS user, where Kerberos is off.
pub const HADOOP_USER_NAME: &str = "HADOOP_USER_NAME";
