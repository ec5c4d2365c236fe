//! The members of a generation, and what becomes of them.

use std::collections::BTreeMap;

use super::failed;
use crate::{
    cluster::{
        RunError,
        protocol::{Failure, Reason},
    },
    learn::Trained,
};

/// By rank.
pub(super) struct Members {
    members: Vec<(u64, Fate)>,
    told_to_leave: bool,
}

enum Fate {
    AtWork,
    Trained(Box<Trained>),
    Left(Failure),
    Lost,
}

/// How a generation ended.
pub(super) enum End {
    /// The accounts of those that lived to give one, rank 0's first.
    Trained(Vec<Trained>),
    /// It broke, or left to form anew; how often its members missed whom, if nobody was lost.
    Again(BTreeMap<u64, u32>),
}

impl Members {
    pub fn new(ids: Vec<u64>) -> Self {
        Self { members: ids.into_iter().map(|id| (id, Fate::AtWork)).collect(), told_to_leave: false }
    }

    pub fn size(&self) -> usize {
        self.members.len()
    }

    pub fn trained(&mut self, id: u64, trained: Trained) {
        self.set(id, Fate::Trained(Box::new(trained)));
    }

    pub fn left(&mut self, id: u64, failure: Failure) {
        self.set(id, Fate::Left(failure));
    }

    pub fn lost(&mut self, id: u64) {
        // What it had reported before counts.
        if self.at_work().contains(&id) {
            self.set(id, Fate::Lost);
        }
    }

    fn set(&mut self, id: u64, fate: Fate) {
        if let Some((_, own)) = self.members.iter_mut().find(|(member, _)| *member == id) {
            *own = fate;
        }
    }

    /// Those from whom there is more to come.
    pub fn at_work(&self) -> Vec<u64> {
        self.members.iter().filter(|(_, fate)| matches!(fate, Fate::AtWork)).map(|(id, _)| *id).collect()
    }

    pub fn is_over(&self) -> bool {
        self.at_work().is_empty()
    }

    /// Whether all are still at work.
    pub fn is_whole(&self) -> bool {
        self.at_work().len() == self.members.len()
    }

    /// Whether one is gone without whom the others cannot end well; true once.
    pub fn breaks(&mut self) -> bool {
        let gone = |fate: &Fate| match fate {
            Fate::Lost => true,
            // Who was asked to leave is followed by the others.
            Fate::Left(failure) => failure.reason != Reason::Asked,
            Fate::AtWork | Fate::Trained(_) => false,
        };
        let breaks = !self.told_to_leave && self.members.iter().any(|(_, fate)| gone(fate));
        self.told_to_leave |= breaks;
        breaks
    }

    /// What came of it; an error if one failed for a reason that a new generation would meet too.
    pub fn end(self) -> Result<End, RunError> {
        let failures = self.members.iter().filter_map(|(_, fate)| match fate {
            Fate::Left(failure) if failure.reason == Reason::Failed => Some(failure),
            _ => None,
        });
        if let Some(failure) = failures.min_by_key(|failure| failure.blame) {
            return Err(failed(failure.clone()));
        }
        // Rank 0 has trained once its last checkpoint is on storage; the others only add to it.
        if matches!(self.members.first(), Some((_, Fate::Trained(_)))) {
            let trained = self.members.into_iter().filter_map(|(_, fate)| match fate {
                Fate::Trained(trained) => Some(*trained),
                _ => None,
            });
            return Ok(End::Trained(trained.collect()));
        }
        let mut missed = BTreeMap::new();
        if !self.members.iter().any(|(_, fate)| matches!(fate, Fate::Lost)) {
            for (_, fate) in &self.members {
                if let Fate::Left(Failure { reason: Reason::Missed(Some(rank)), .. }) = fate
                    && let Some((id, _)) = self.members.get(rank.0 as usize)
                {
                    *missed.entry(*id).or_default() += 1;
                }
            }
        }
        Ok(End::Again(missed))
    }
}
