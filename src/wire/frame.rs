//! Frames: a header of fixed length, then at most as many bytes as its kind may have.
//!
//! ```text
//!   magic 4 | kind 1 | 0 3 | generation 4 | operation 4 | step 8 | length 4     little-endian
//! ```

use super::WireError;
use crate::limits;

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 28;

const MAGIC: [u8; 4] = *b"EMB1";

/// What a frame is about; nothing but its length is looked at here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// The formation of the fleet that it belongs to.
    pub generation: u32,
    /// Counts a connection's operations.
    pub operation: u32,
    /// The step that the sender is at.
    pub step: u64,
    /// Bytes that follow.
    pub length: u32,
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A word between driver and executor.
    Control = 1,
    /// A rank has come to a collective operation.
    Enter = 2,
    /// A part of a bucket.
    Chunk = 3,
    /// The last or only part of a message between two ranks.
    Message = 4,
    /// A part of a message that is not the last.
    MessagePart = 5,
    /// Why the sender gives up: the rank to blame.
    Blame = 6,
    /// Why the other side is not let in.
    Refusal = 7,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        let all =
            [Self::Control, Self::Enter, Self::Chunk, Self::Message, Self::MessagePart, Self::Blame, Self::Refusal];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }

    /// Bytes that may follow a header of this kind.
    fn limit(self) -> u32 {
        match self {
            Self::Control => limits::CONTROL_BYTES,
            Self::Enter | Self::Chunk | Self::Message | Self::MessagePart => limits::FRAME_BYTES as u32,
            Self::Blame | Self::Refusal => limits::HANDSHAKE_BYTES as u32,
        }
    }
}

impl Header {
    /// A header outside of any generation.
    pub fn plain(kind: Kind, length: usize) -> Self {
        Self { kind, generation: 0, operation: 0, step: 0, length: length as u32 }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[8..12].copy_from_slice(&self.generation.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.operation.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.step.to_le_bytes());
        bytes[24..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads a header; the length that it tells is one that its kind may have.
    pub(super) fn from_bytes(peer: &str, bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let garbage = |what| WireError::Garbage { peer: peer.to_owned(), what };
        if bytes[..4] != MAGIC {
            return Err(garbage("no frame begins so"));
        }
        let kind = Kind::from_byte(bytes[4]).ok_or_else(|| garbage("a frame of an unknown kind"))?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let length = word(24);
        if length > kind.limit() {
            let (length, limit) = (u64::from(length), u64::from(kind.limit()));
            return Err(WireError::TooLong { peer: peer.to_owned(), length, limit });
        }
        let step = u64::from(word(16)) | u64::from(word(20)) << 32;
        Ok(Self { kind, generation: word(8), operation: word(12), step, length })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_come_back(
            kind in 1_u8..8, generation: u32, operation: u32, step: u64, length in 0..limits::HANDSHAKE_BYTES as u32,
        ) {
            let kind = Kind::from_byte(kind).unwrap();
            let header = Header { kind, generation, operation, step, length };
            prop_assert_eq!(Header::from_bytes("peer", &header.to_bytes()).unwrap(), header);
        }

        #[test]
        fn any_bytes_are_a_header_of_bounded_length_or_an_error(bytes: [u8; HEADER_BYTES], magic: bool) {
            let mut bytes = bytes;
            if magic {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4] %= 9;
            }
            if let Ok(header) = Header::from_bytes("peer", &bytes) {
                prop_assert!(header.length <= header.kind.limit());
            }
        }
    }
}
