//! What workers and servers tell each other: a few integers, as the bits of f32 numbers, then
//! numbers.

use crate::{
    ids::Rank,
    learn::{CommError, sync::parts::check_length},
};

/// A worker to a server, after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Push<'a> {
    /// Of the worker, in this epoch.
    pub finished: u64,
    /// Whether there is a gradient.
    pub applies: bool,
    /// Whether somebody asks all to meet.
    pub hurry: bool,
    /// Whether the worker goes to the meeting; there is no answer.
    pub leaves: bool,
    /// Of the server's part, mean over the rows, by their share; empty if none is to be applied.
    pub gradient: &'a [f32],
}

/// A server to a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Answer<'a> {
    /// Steps of the epoch after which all meet, as far as the server knows.
    pub meeting: u64,
    /// Whether somebody asks all to meet.
    pub hurry: bool,
    /// The server's part.
    pub parameters: &'a [f32],
}

const PUSH_HEAD: usize = 3;
const ANSWER_HEAD: usize = 3;

impl<'a> Push<'a> {
    pub fn write(&self, message: &mut Vec<f32>) {
        message.clear();
        let [low, high] = halves(self.finished);
        let flags = u32::from(self.hurry) | u32::from(self.leaves) << 1 | u32::from(self.applies) << 2;
        message.extend([low, high, flags].map(f32::from_bits));
        message.extend_from_slice(self.gradient);
    }

    /// What a worker sent to a server of a part of this length.
    pub fn read(worker: Rank, message: &'a [f32], length: usize) -> Result<Self, CommError> {
        let (head, gradient) = split::<PUSH_HEAD>(worker, message)?;
        let [low, high, flags] = head;
        let (hurry, leaves, applies) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
        check_length(worker, gradient.len(), if applies { length } else { 0 })?;
        Ok(Self { finished: whole(low, high), applies, hurry, leaves, gradient })
    }
}

impl<'a> Answer<'a> {
    pub fn write(&self, message: &mut Vec<f32>) {
        message.clear();
        let [low, high] = halves(self.meeting);
        message.extend([low, high, u32::from(self.hurry)].map(f32::from_bits));
        message.extend_from_slice(self.parameters);
    }

    /// What a server of a part of this length sent.
    pub fn read(server: Rank, message: &'a [f32], length: usize) -> Result<Self, CommError> {
        let (head, parameters) = split::<ANSWER_HEAD>(server, message)?;
        check_length(server, parameters.len(), length)?;
        let [low, high, hurry] = head;
        Ok(Self { meeting: whole(low, high), hurry: hurry != 0, parameters })
    }
}

fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

fn whole(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn split<const HEAD: usize>(from: Rank, message: &[f32]) -> Result<([u32; HEAD], &[f32]), CommError> {
    match message.split_first_chunk::<HEAD>() {
        Some((head, rest)) => Ok((head.map(f32::to_bits), rest)),
        None => Err(CommError::Mismatch { operation: "receive", rank: from, got: message.len(), expected: HEAD }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_others_are_refused() {
        let mut message = Vec::new();
        for (finished, applies) in [(0, false), (1, true), (u64::MAX, true)] {
            for (hurry, leaves) in [(false, true), (true, false)] {
                let gradient: &[f32] = if applies { &[1.0, -0.0] } else { &[] };
                let push = Push { finished, applies, hurry, leaves, gradient };
                push.write(&mut message);
                assert_eq!(Push::read(Rank(1), &message, 2).unwrap(), push);
                let answer = Answer { meeting: finished, hurry, parameters: &[0.5] };
                answer.write(&mut message);
                assert_eq!(Answer::read(Rank(1), &message, 1).unwrap(), answer);
            }
        }
        for length in [0, 2, 4, 6] {
            let error = Answer::read(Rank(3), &vec![0.0; length], 2).unwrap_err();
            assert!(matches!(error, CommError::Mismatch { rank: Rank(3), .. }), "{error}");
        }
    }
}
