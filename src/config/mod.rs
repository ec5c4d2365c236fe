//! A site's settings: `conf/emberflow.yaml` and the environment, checked once.

use std::path::PathBuf;

/// What holds for every run on this site.
#[derive(Clone, Debug, Default)]
pub struct SiteConfig {
    /// Folder of core-site.xml and hdfs-site.xml: the setting, else `HADOOP_CONF_DIR`, else
    /// `$HADOOP_HOME/etc/hadoop` where that exists.
    pub hadoop_conf_dir: Option<PathBuf>,
    /// The HDFS user, where Kerberos is off: the setting, else `HADOOP_USER_NAME`.
    pub hadoop_user: Option<String>,
    /// Local folder for spilled data; default: the system's temporary folder.
    pub scratch_dir: Option<PathBuf>,
}
