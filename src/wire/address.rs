//! Where a process can be reached.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where a process listens: over the network and, for processes on its machine, over a Unix
/// socket, which copies each byte once less.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// `host:port`.
    pub network: String,
    /// The way for processes on the same machine, if there is one.
    pub local: Option<Local>,
}

/// A Unix socket without a file: it vanishes with its process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Local {
    /// The machine, by the ID of its boot.
    pub machine: String,
    /// The socket's abstract name.
    pub name: String,
}

impl Address {
    /// An address that is reached over the network only.
    pub fn network(network: impl Into<String>) -> Self {
        Self { network: network.into(), local: None }
    }

    /// The same process, reached by another host name; for who listens on all addresses.
    pub fn with_host(&self, host: &str) -> Self {
        let port = self.network.rsplit(':').next().unwrap_or_default();
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        Self { network: format!("{host}:{port}"), local: self.local.clone() }
    }

    /// The host's name or number, without brackets.
    pub(super) fn host(&self) -> &str {
        let host = self.network.rsplit_once(':').map_or(self.network.as_str(), |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.network)
    }
}

/// Names this machine, as long as it runs.
pub(super) fn machine() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_come_out_of_addresses() {
        let check = |network: &str, host: &str| assert_eq!(Address::network(network).host(), host);
        check("node7.cluster:7000", "node7.cluster");
        check("10.0.0.1:7000", "10.0.0.1");
        check("[::1]:7000", "::1");
        assert_eq!(Address::network("0.0.0.0:7000").with_host("fe80::1").network, "[fe80::1]:7000");
        assert_eq!(Address::network("[::]:7000").with_host("node7").network, "node7:7000");
    }
}
