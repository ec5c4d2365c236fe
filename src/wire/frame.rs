//! The codec: a header of fixed length, then a payload.
//!
//! ```text
//!   0      4          6      7    8            12       16     24          32
//!   ├magic─┼─protocol─┼─kind─┼─0──┼─generation─┼─length─┼─step─┼─operation─┤ payload
//! ```
//!
//! All integers are little-endian.

use std::io;

use crate::ids::Generation;

/// Bytes before a payload.
pub const HEADER_BYTES: usize = 32;

/// The version of everything that is said over a connection.
pub(super) const PROTOCOL: u16 = 1;

const MAGIC: [u8; 4] = *b"EMBF";

/// What a frame is about. Kinds below 16 are the handshake's; what the others mean, and whether
/// they use step and operation, is up to those who talk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// The kind of message.
    pub kind: u8,
    /// The formation of the fleet in which it was sent.
    pub generation: Generation,
    /// The step it belongs to.
    pub step: u64,
    /// Its number among the operations of the connection.
    pub operation: u64,
}

/// A label and the length of the payload in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is about.
    pub label: Label,
    /// Bytes of its payload.
    pub length: u32,
}

/// A whole message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it is about.
    pub label: Label,
    /// What it says.
    pub payload: Vec<u8>,
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameFault {
    /// They do not begin as frames do.
    #[error("these bytes are not emberflow's")]
    Magic,
    /// Another version wrote them.
    #[error("protocol {0}, not {PROTOCOL}")]
    Protocol(u16),
    /// A field has a value that nobody sends.
    #[error("a header that nobody sends")]
    Header,
    /// The payload would be larger than agreed.
    #[error("a payload of {length} bytes; {limit} are agreed")]
    Length {
        /// What the header says.
        length: u32,
        /// What is allowed.
        limit: usize,
    },
    /// The payload is not what its kind says.
    #[error("a payload that makes no sense")]
    Payload,
}

impl Header {
    /// The header as bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let Label { kind, generation, step, operation } = self.label;
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&PROTOCOL.to_le_bytes());
        bytes[6] = kind;
        bytes[8..12].copy_from_slice(&generation.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.length.to_le_bytes());
        bytes[16..24].copy_from_slice(&step.to_le_bytes());
        bytes[24..].copy_from_slice(&operation.to_le_bytes());
        bytes
    }

    /// Reads a header, and refuses a payload of more than `limit` bytes.
    pub fn decode(bytes: &[u8; HEADER_BYTES], limit: usize) -> Result<Self, FrameFault> {
        if bytes[..4] != MAGIC {
            return Err(FrameFault::Magic);
        }
        let protocol = u16::from_le_bytes([bytes[4], bytes[5]]);
        if protocol != PROTOCOL {
            return Err(FrameFault::Protocol(protocol));
        }
        if bytes[7] != 0 {
            return Err(FrameFault::Header);
        }
        let length = u32_at(bytes, 12);
        if length as usize > limit {
            return Err(FrameFault::Length { length, limit });
        }
        let label = Label {
            kind: bytes[6],
            generation: Generation(u32_at(bytes, 8)),
            step: u64_at(bytes, 16),
            operation: u64_at(bytes, 24),
        };
        Ok(Self { label, length })
    }
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Puts frames together from what arrives; a read that times out in the middle loses nothing.
#[derive(Default)]
pub(super) struct Assembler {
    head: [u8; HEADER_BYTES],
    /// Bytes of the header that have arrived.
    head_bytes: usize,
    header: Option<Header>,
    payload: Vec<u8>,
    /// Bytes of the payload that have arrived.
    payload_bytes: usize,
}

/// Why no frame came out.
#[derive(Debug)]
pub(super) enum Unread {
    /// Reading failed, or would block.
    Io(io::Error),
    /// The stream ended, between frames or within one.
    End,
    /// What arrived is no frame.
    Fault(FrameFault),
}

impl Assembler {
    /// Reads on until a frame is whole.
    pub fn next(
        &mut self,
        limit: usize,
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<Frame, Unread> {
        let header = match self.header {
            Some(header) => header,
            None => self.read_header(limit, &mut read)?,
        };
        while self.payload_bytes < self.payload.len() {
            match read(&mut self.payload[self.payload_bytes..]).map_err(Unread::Io)? {
                0 => return Err(Unread::End),
                bytes => self.payload_bytes += bytes,
            }
        }
        let payload = std::mem::take(&mut self.payload);
        *self = Self::default();
        Ok(Frame { label: header.label, payload })
    }

    fn read_header(
        &mut self,
        limit: usize,
        read: &mut impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<Header, Unread> {
        while self.head_bytes < HEADER_BYTES {
            match read(&mut self.head[self.head_bytes..]).map_err(Unread::Io)? {
                0 => return Err(Unread::End),
                bytes => self.head_bytes += bytes,
            }
            // Who says something else altogether need not say 32 bytes of it.
            let magic = self.head_bytes.min(MAGIC.len());
            if self.head[..magic] != MAGIC[..magic] {
                return Err(Unread::Fault(FrameFault::Magic));
            }
        }
        let header = Header::decode(&self.head, limit).map_err(Unread::Fault)?;
        self.payload = vec![0; header.length as usize];
        self.header = Some(header);
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 1000;

    fn any_frame() -> impl Strategy<Value = Frame> {
        let payload = proptest::collection::vec(any::<u8>(), 0..LIMIT);
        (any::<u8>(), any::<u32>(), any::<u64>(), any::<u64>(), payload).prop_map(
            |(kind, generation, step, operation, payload)| Frame {
                label: Label { kind, generation: Generation(generation), step, operation },
                payload,
            },
        )
    }

    fn bytes_of(frames: &[Frame]) -> Vec<u8> {
        let encode = |frame: &Frame| {
            let header = Header { label: frame.label, length: frame.payload.len() as u32 };
            [&header.encode()[..], &frame.payload].concat()
        };
        frames.iter().flat_map(encode).collect()
    }

    /// Reads all frames there are; reads give `piece` bytes at most, and sometimes none yet.
    fn read_all(mut bytes: &[u8], piece: usize) -> (Vec<Frame>, Unread) {
        let (mut assembler, mut frames, mut calls) = (Assembler::default(), Vec::new(), 0);
        loop {
            let next = assembler.next(LIMIT, |buffer| {
                calls += 1;
                if calls % 3 == 0 {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                let length = buffer.len().min(piece);
                bytes.read(&mut buffer[..length])
            });
            match next {
                Ok(frame) => frames.push(frame),
                Err(Unread::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(end) => return (frames, end),
            }
        }
    }

    proptest! {
        #[test]
        fn frames_survive_the_trip(frames in proptest::collection::vec(any_frame(), 0..5), piece in 1_usize..100) {
            let (found, end) = read_all(&bytes_of(&frames), piece);
            prop_assert_eq!(found, frames);
            prop_assert!(matches!(end, Unread::End));
        }

        #[test]
        fn any_bytes_end_in_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..100) {
            read_all(&bytes, piece);
        }

        #[test]
        fn damage_is_found_or_harmless(
            frames in proptest::collection::vec(any_frame(), 1..4),
            at: proptest::sample::Index,
            byte: u8,
            cut: proptest::sample::Index,
        ) {
            let mut bytes = bytes_of(&frames);
            let at = at.index(bytes.len());
            bytes[at] = byte;
            bytes.truncate(cut.index(bytes.len()));
            let (found, _) = read_all(&bytes, 64);
            prop_assert!(found.len() <= bytes.len() / HEADER_BYTES);
        }
    }

    #[test]
    fn strangers_are_told_apart() {
        let check = |bytes: &[u8], fault| {
            let (frames, end) = read_all(bytes, 8);
            assert!(frames.is_empty() && matches!(end, Unread::Fault(found) if found == fault), "{end:?}");
        };
        let good = Header { label: Label::default(), length: u32::MAX }.encode();
        check(&good, FrameFault::Length { length: u32::MAX, limit: LIMIT });
        check(b"GET / HTTP/1.0\r\n\r\n", FrameFault::Magic);
        let mut other = good;
        other[4] = 9;
        check(&other, FrameFault::Protocol(9));
        let mut other = good;
        other[7] = 1;
        check(&other, FrameFault::Header);
        let (_, end) = read_all(&good[..5], 8);
        assert!(matches!(end, Unread::End));
    }
}
