//! Why a storage call failed; every variant names the place.

use std::{error::Error, io, time::Duration};

use hdfs_native::HdfsError;

use super::Location;
use crate::remedy::{Remedied, Remedy};

/// An error of any kind, as the cause of another.
pub(super) type Cause = Box<dyn Error + Send + Sync>;

/// Why a storage call failed; every variant names the place.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// A text is not a place.
    #[error("{text:?} is no path or URL that can be used: {reason}")]
    BadLocation {
        /// The text.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// This build or this site cannot reach such places.
    #[error("{location}: {reason}")]
    Unsupported {
        /// The place.
        location: Location,
        /// What is missing, and the way out.
        reason: String,
    },
    /// There is no such file or folder.
    #[error("{0}: no such file or folder")]
    NotFound(Location),
    /// It is there already.
    #[error("{0}: exists already")]
    AlreadyExists(Location),
    /// The caller may not.
    #[error("{location}: permission denied")]
    PermissionDenied {
        /// The place.
        location: Location,
        /// What the store says.
        source: Cause,
    },
    /// No space or quota is left.
    #[error("{location}: no space or quota is left")]
    NoSpace {
        /// The place.
        location: Location,
        /// What the store says.
        source: Cause,
    },
    /// The file system is read-only, or something else stands in the way.
    #[error("{location}: cannot be written")]
    NotWritable {
        /// The place.
        location: Location,
        /// What the store says.
        source: Cause,
    },
    /// The NameNode is in safe mode.
    #[error("{location}: the NameNode is in safe mode and takes no writes; try again later")]
    SafeMode {
        /// The place.
        location: Location,
        /// What the store says.
        source: Cause,
    },
    /// The service did not answer.
    #[error("{location}: the store cannot be reached; is it running at that address?")]
    Unreachable {
        /// The place.
        location: Location,
        /// What the network says.
        source: Cause,
    },
    /// A call took too long.
    #[error("{location}: no answer within {} s", deadline.as_secs())]
    Deadline {
        /// The place.
        location: Location,
        /// How long was waited.
        deadline: Duration,
    },
    /// Anything else.
    #[error("{location}: the store failed")]
    Other {
        /// The place.
        location: Location,
        /// What the store says.
        source: Cause,
    },
}

impl Remedied for StorageError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::BadLocation { .. } | Self::Unsupported { .. } => Remedy::FixFile,
            Self::NotFound(_) => Remedy::FixData,
            Self::AlreadyExists(_) | Self::NoSpace { .. } | Self::NotWritable { .. } => Remedy::FixTarget,
            Self::PermissionDenied { .. } => Remedy::AskPermission,
            Self::SafeMode { .. } | Self::Unreachable { .. } | Self::Deadline { .. } => Remedy::TryAgain,
            Self::Other { .. } => Remedy::CheckStorage,
        }
    }
}

/// A deadline that passed, inside errors of `object_store`.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {} s", .0.as_secs())]
pub(super) struct Elapsed(pub Duration);

impl StorageError {
    /// What an error of any library says about a storage call, if its chain of causes holds
    /// one; `None` where storage is not to blame.
    pub(super) fn classify(error: &(dyn Error + 'static)) -> Option<Kind> {
        let mut cause = Some(error);
        let mut found = None;
        while let Some(error) = cause {
            found = kind_of(error).or(found);
            cause = error.source();
        }
        found
    }

    /// The error for a failed call at this place.
    pub(crate) fn new(location: &Location, error: impl Into<Cause>) -> Self {
        let source = error.into();
        let kind = Self::classify(source.as_ref());
        let location = location.clone();
        match kind {
            Some(Kind::NotFound) => Self::NotFound(location),
            Some(Kind::AlreadyExists) => Self::AlreadyExists(location),
            Some(Kind::PermissionDenied) => Self::PermissionDenied { location, source },
            Some(Kind::NoSpace) => Self::NoSpace { location, source },
            Some(Kind::NotWritable) => Self::NotWritable { location, source },
            Some(Kind::SafeMode) => Self::SafeMode { location, source },
            Some(Kind::Unreachable) => Self::Unreachable { location, source },
            Some(Kind::Deadline(deadline)) => Self::Deadline { location, deadline },
            None => Self::Other { location, source },
        }
    }

    /// The error for another library's failure at this place, if storage is to blame.
    pub fn of(location: &Location, error: impl Into<Cause>) -> Result<Self, Cause> {
        let error = error.into();
        match Self::classify(error.as_ref()) {
            Some(_) => Ok(Self::new(location, error)),
            None => Err(error),
        }
    }
}

/// What kind of failure a cause tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// No such file.
    NotFound,
    /// There already.
    AlreadyExists,
    /// Not allowed.
    PermissionDenied,
    /// Full.
    NoSpace,
    /// Read-only or in the way.
    NotWritable,
    /// A NameNode in safe mode.
    SafeMode,
    /// No connection.
    Unreachable,
    /// Too slow.
    Deadline(Duration),
}

impl Kind {
    /// Whether the same call may succeed a moment later (a deadline was long enough).
    pub(super) fn is_transient(self) -> bool {
        matches!(self, Self::Unreachable)
    }
}

fn kind_of(error: &(dyn Error + 'static)) -> Option<Kind> {
    if let Some(Elapsed(deadline)) = error.downcast_ref() {
        return Some(Kind::Deadline(*deadline));
    }
    if let Some(error) = error.downcast_ref::<object_store::Error>() {
        return match error {
            object_store::Error::NotFound { .. } => Some(Kind::NotFound),
            object_store::Error::AlreadyExists { .. } => Some(Kind::AlreadyExists),
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                Some(Kind::PermissionDenied)
            }
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<io::Error>() {
        return kind_of_io(error);
    }
    error.downcast_ref::<HdfsError>().and_then(kind_of_hdfs)
}

fn kind_of_io(error: &io::Error) -> Option<Kind> {
    use io::ErrorKind as K;
    match error.kind() {
        K::NotFound => Some(Kind::NotFound),
        K::AlreadyExists => Some(Kind::AlreadyExists),
        K::PermissionDenied => Some(Kind::PermissionDenied),
        K::StorageFull | K::QuotaExceeded | K::FileTooLarge => Some(Kind::NoSpace),
        K::ReadOnlyFilesystem | K::NotADirectory | K::IsADirectory => Some(Kind::NotWritable),
        K::ConnectionRefused
        | K::ConnectionReset
        | K::ConnectionAborted
        | K::NotConnected
        | K::BrokenPipe
        | K::TimedOut
        | K::HostUnreachable
        | K::NetworkUnreachable
        | K::NetworkDown => Some(Kind::Unreachable),
        _ => None,
    }
}

/// The server's exception class tells most.
fn kind_of_hdfs(error: &HdfsError) -> Option<Kind> {
    match error {
        HdfsError::IOError(error) => kind_of_io(error),
        HdfsError::FileNotFound(_) => Some(Kind::NotFound),
        HdfsError::AlreadyExists(_) => Some(Kind::AlreadyExists),
        HdfsError::RPCError(class, _) | HdfsError::FatalRPCError(class, _) => {
            let class = class.rsplit('.').next().unwrap_or_default();
            match class {
                "AccessControlException" => Some(Kind::PermissionDenied),
                "FileNotFoundException" => Some(Kind::NotFound),
                "FileAlreadyExistsException" => Some(Kind::AlreadyExists),
                "SafeModeException" => Some(Kind::SafeMode),
                "StandbyException" | "RetriableException" | "ObserverRetryOnActiveException" => Some(Kind::Unreachable),
                "ParentNotDirectoryException" => Some(Kind::NotWritable),
                _ if class.contains("QuotaExceeded") => Some(Kind::NoSpace),
                _ => None,
            }
        }
        // The client masks what a DataNode answered; the file can be tried again elsewhere.
        HdfsError::DataTransferError(_) | HdfsError::BlocksNotFound(_) => Some(Kind::Unreachable),
        HdfsError::SASLError(_) | HdfsError::GSSAPIError(..) | HdfsError::NoSASLMechanism => {
            Some(Kind::PermissionDenied)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_known_cause_decides() {
        let location = Location::parse("hdfs://nn/a", std::path::Path::new("/")).unwrap();
        let wrap = |source: Cause| object_store::Error::Generic { store: "HDFS", source };
        let check = |error: Cause, remedy: Remedy| {
            assert_eq!(StorageError::new(&location, error).remedy(), remedy);
        };
        let rpc = |class: &str| HdfsError::RPCError(format!("org.apache.hadoop.{class}"), String::new());
        check(wrap(rpc("hdfs.server.namenode.SafeModeException").into()).into(), Remedy::TryAgain);
        check(wrap(rpc("security.AccessControlException").into()).into(), Remedy::AskPermission);
        check(wrap(rpc("hdfs.protocol.DSQuotaExceededException").into()).into(), Remedy::FixTarget);
        check(io::Error::from(io::ErrorKind::ConnectionRefused).into(), Remedy::TryAgain);
        check(io::Error::from(io::ErrorKind::StorageFull).into(), Remedy::FixTarget);
        check(wrap(Elapsed(Duration::from_secs(1)).into()).into(), Remedy::TryAgain);
        check("something else".into(), Remedy::CheckStorage);
    }
}
