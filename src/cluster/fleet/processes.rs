//! Executors as processes: who is there, generation by generation.
//!
//! ```text
//!   gather ── enough executors? ──▶ prepare ──▶ generation ──▶ trained
//!     ▲                                            │
//!     └────── one lost, one joins: all leave ──────┘   go on from the state furthest along,
//!                                                      or from the last checkpoint
//! ```
//!
//! Everything that happens arrives in one inbox; whoever is silent for `limits::SILENCE` is lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    FleetPlan, failed,
    launch::Launch,
    members::{End, Members},
};
use crate::{
    cluster::{
        RunError,
        link::{Link, Speaker},
        protocol::{Assignment, EmbedWork, FromExecutor, Hello, ToExecutor, Work, WorkKind},
        training::Training,
    },
    embed::WrittenPart,
    ids::{Generation, Rank},
    learn::Trained,
    limits, remedy,
    telemetry::{Event, Events},
    wire::{Listener, Security},
};

/// How often the driver looks around while nothing happens.
const TICK: Duration = Duration::from_millis(50);

/// Generations in a row that may break, with nobody lost and no step done, before the executor
/// that is missed most is sent away.
const FRUITLESS: u32 = 2;

/// The driver's side of a fleet of processes.
pub(in crate::cluster) struct Processes {
    /// What the run asked for.
    asked: FleetPlan,
    /// What it asks for now.
    plan: FleetPlan,
    inbox: Receiver<Incoming>,
    executors: BTreeMap<u64, Executor>,
    launch: Launch,
    generation: Generation,
    works: u64,
    /// Epochs of the training that were told; a generation may repeat one.
    told: u32,
    /// Whether, after a failure, any executor's state is one to go on with.
    survives: bool,
    /// Executors that the training can use.
    most: usize,
    /// Executors that the training needs besides those that compute.
    servers: usize,
    stop: Arc<AtomicBool>,
    events: Events,
    closing: Arc<AtomicBool>,
}

/// An executor that has joined.
struct Executor {
    hello: Hello,
    speaker: Speaker,
    /// The work that it has ready, and how far along its state is.
    ready: Option<(u64, Option<u64>)>,
}

/// What arrives.
enum Incoming {
    Joined(u64, Hello, Speaker),
    Said(u64, FromExecutor),
    Lost(u64, String),
}

/// What concerns the stage at work.
enum Heard {
    Said(u64, FromExecutor),
    Lost(u64),
    Joined,
    Nothing,
}

impl Processes {
    /// Listens, and starts what the launcher starts.
    pub fn start(
        plan: FleetPlan,
        listen: &str,
        security: &Security,
        events: Events,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, RunError> {
        let listener = Arc::new(Listener::bind(listen, security)?);
        let address = listener.address();
        let listener_name = listener.host_and_port().to_owned();
        let (sender, inbox) = mpsc::channel();
        let closing = Arc::new(AtomicBool::new(false));
        thread::spawn({
            let closing = Arc::clone(&closing);
            move || accept(&listener, &sender, &closing)
        });
        let launch = Launch::new(&plan, &address, security)?;
        if !plan.children {
            events.emit(&Event::Warning { message: format!("waiting for executors to join at {listener_name}") });
        }
        let executors = BTreeMap::new();
        Ok(Self {
            asked: plan.clone(),
            plan,
            inbox,
            executors,
            launch,
            generation: Generation(0),
            works: 0,
            told: 0,
            survives: false,
            most: 0,
            servers: 0,
            stop,
            events,
            closing,
        })
    }

    /// How many executors take part from now on.
    pub fn resize(&mut self, executors: usize) {
        let asked = &self.asked;
        let max = if executors == asked.wanted { asked.max } else { executors };
        self.plan = FleetPlan { wanted: executors, max, min: asked.min.min(executors), ..asked.clone() };
    }

    /// Hosts that executors have joined from.
    pub fn hosts(&self) -> usize {
        self.executors.values().map(|executor| &executor.hello.host).collect::<BTreeSet<_>>().len()
    }

    /// Trains to the end, whoever is lost on the way as long as enough are left; every rank's
    /// account, as far as it lived to give one.
    pub fn train(&mut self, training: &Training) -> Result<Vec<Trained>, RunError> {
        let work = self.new_work(WorkKind::Train(Box::new(training.work.clone())));
        self.survives = training.survives();
        self.most = self.plan.max.min(training.most_executors() as usize);
        self.servers = training.servers() as usize;
        self.launch.want(self.plan.wanted + self.servers);
        self.told = 0;
        let (mut fruitless, mut furthest) = (0, None);
        loop {
            self.gather(&work)?;
            self.prepare(&work)?;
            match self.generation(&work)? {
                End::Trained(trained) => return Ok(trained),
                End::Again(missed) => {
                    let now = self.furthest(&work);
                    fruitless = if missed.is_empty() || now > furthest { 0 } else { fruitless + 1 };
                    furthest = furthest.max(now);
                    let most = missed.into_iter().max_by_key(|(_, times)| *times);
                    if let Some((id, _)) = most.filter(|_| fruitless >= FRUITLESS) {
                        self.lose(id, "the others do not reach it");
                        fruitless = 0;
                    }
                }
            }
        }
    }

    /// Encodes all files; each is given to whoever is free, again if that one is lost.
    pub fn embed(
        &mut self,
        work: EmbedWork,
        parts: usize,
        progress: &dyn Fn(u64),
    ) -> Result<Vec<WrittenPart>, RunError> {
        let work = self.new_work(WorkKind::Embed(Box::new(work)));
        self.servers = 0;
        let mut waiting: Vec<usize> = (0..parts).rev().collect();
        let mut busy: BTreeMap<u64, usize> = BTreeMap::new();
        let (mut written, mut rows) = (Vec::with_capacity(parts), 0);
        while written.len() < parts {
            if self.executors.is_empty() {
                self.gather(&work)?;
            }
            if self.ready(&work).next().is_none() {
                self.prepare(&work)?;
            }
            let free: Vec<u64> = self.ready(&work).map(|(id, _)| id).filter(|id| !busy.contains_key(id)).collect();
            for id in free {
                if let Some(part) = waiting.pop() {
                    busy.insert(id, part);
                    self.say(id, &ToExecutor::Write(part));
                }
            }
            match self.hear()? {
                Heard::Said(id, FromExecutor::Written(part)) => {
                    busy.remove(&id);
                    rows += part.file.rows;
                    progress(rows);
                    written.push(part);
                }
                Heard::Said(_, FromExecutor::Failed(failure)) => return Err(failed(failure)),
                Heard::Lost(id) => waiting.extend(busy.remove(&id)),
                Heard::Joined => self.prepare(&work)?,
                Heard::Said(..) | Heard::Nothing => {}
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(RunError::Interrupted);
            }
        }
        Ok(written)
    }

    fn new_work(&mut self, kind: WorkKind) -> Arc<Work> {
        self.works += 1;
        Arc::new(Work { number: self.works, kind })
    }

    /// Waits until as many are there as were asked for, or, after a while, as many as are needed.
    fn gather(&mut self, work: &Work) -> Result<(), RunError> {
        let started = Instant::now();
        loop {
            self.launch.keep_up()?;
            let (found, waited) = (self.executors.len().saturating_sub(self.servers), started.elapsed());
            let exhausted = self.launch.is_exhausted(self.executors.len());
            // In the middle of a training survivors go on at once; who joins later is taken in then.
            let patience = if self.generation.0 == 0 { limits::JOIN_PATIENCE } else { Duration::ZERO };
            if found >= self.plan.wanted || (found >= self.plan.min && (waited >= patience || exhausted)) {
                return Ok(());
            }
            if waited >= limits::EXECUTORS_WAIT || exhausted {
                self.save(work);
                return Err(RunError::TooFewExecutors { found, needed: self.plan.min });
            }
            if self.stop.load(Ordering::Relaxed) {
                self.save(work);
                return Err(RunError::Interrupted);
            }
            self.hear()?;
        }
    }

    /// Asks whose state is furthest along to keep it as the checkpoint.
    fn save(&mut self, work: &Work) {
        let furthest = self.ready(work).filter_map(|(id, updates)| Some((updates?, id))).max();
        let Some((_, id)) = furthest.filter(|_| self.survives) else { return };
        self.say(id, &ToExecutor::Save);
        let deadline = Instant::now() + limits::SHUTDOWN;
        while Instant::now() < deadline && self.executors.contains_key(&id) {
            match self.hear() {
                Ok(Heard::Said(_, FromExecutor::Saved | FromExecutor::Failed(_))) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    /// Gets the work ready on every executor that has not got it.
    fn prepare(&mut self, work: &Arc<Work>) -> Result<(), RunError> {
        let fresh = |executor: &Executor| executor.ready.is_none_or(|(number, _)| number != work.number);
        let mut asked: Vec<u64> = Vec::new();
        loop {
            let new = self.executors.iter().filter(|(id, executor)| fresh(executor) && !asked.contains(id));
            let new: Vec<u64> = new.map(|(id, _)| *id).collect();
            for id in new {
                asked.push(id);
                self.say(id, &ToExecutor::Work(Arc::clone(work)));
            }
            if !self.executors.values().any(fresh) {
                return Ok(());
            }
            if let Heard::Said(_, FromExecutor::Failed(failure)) = self.hear()? {
                return Err(failed(failure));
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(RunError::Interrupted);
            }
        }
    }

    /// Those that have the work ready, and how far along their state is.
    fn ready(&self, work: &Work) -> impl Iterator<Item = (u64, Option<u64>)> {
        let number = work.number;
        let ready = self.executors.iter().filter_map(move |(id, executor)| Some((*id, executor.ready?)));
        ready.filter(move |(_, (work, _))| *work == number).map(|(id, (_, updates))| (id, updates))
    }

    fn furthest(&self, work: &Work) -> Option<u64> {
        self.ready(work).filter_map(|(_, updates)| updates).max()
    }

    /// One formation of the fleet, until it has trained, broken, or left.
    fn generation(&mut self, work: &Work) -> Result<End, RunError> {
        self.generation.0 += 1;
        let members: Vec<u64> = self.ready(work).map(|(id, _)| id).take(self.most + self.servers).collect();
        if members.len() < self.plan.min + self.servers {
            return Ok(End::Again(BTreeMap::new()));
        }
        self.assign(&members);
        let mut generation = Members::new(members);
        let (mut stopping, mut joining) = (false, false);
        while !generation.is_over() {
            let heard = self.hear()?;
            match heard {
                Heard::Said(id, FromExecutor::Trained { generation: number, trained }) if number == self.generation => {
                    self.see(id, work, None);
                    generation.trained(id, *trained);
                }
                Heard::Said(id, FromExecutor::Left { generation: number, updates, failure })
                    if number == self.generation =>
                {
                    self.see(id, work, Some(updates));
                    generation.left(id, failure);
                }
                Heard::Said(_, FromExecutor::Event(event)) => {
                    let boundary = matches!(event, Event::Epoch { .. });
                    self.tell(&event);
                    let most = self.executors.len().min(self.most + self.servers);
                    let room = generation.size() < most;
                    if boundary && room && !joining && generation.is_whole() {
                        joining = true;
                        self.say_all(&generation.at_work(), &ToExecutor::Regroup);
                    }
                }
                Heard::Lost(id) => generation.lost(id),
                Heard::Said(..) | Heard::Joined | Heard::Nothing => {}
            }
            if self.stop.load(Ordering::Relaxed) && !stopping {
                stopping = true;
                self.say_all(&generation.at_work(), &ToExecutor::Stop);
            }
            if generation.breaks() {
                self.say_all(&generation.at_work(), &ToExecutor::Leave(self.generation));
            }
        }
        match generation.end() {
            Ok(End::Again(_)) if stopping => Err(RunError::Interrupted),
            end => end,
        }
    }

    fn assign(&mut self, members: &[u64]) {
        let peers: Vec<String> = members.iter().map(|id| self.executors[id].hello.address.clone()).collect();
        let along = |id: &u64| self.executors[id].ready.and_then(|(_, updates)| updates);
        // The first of those furthest along; without any, rank 0 looks at storage.
        let best = members.iter().enumerate().filter_map(|(rank, id)| Some((along(id)?, std::cmp::Reverse(rank))));
        let best = best.max().filter(|_| self.survives).map(|(_, rank)| Rank(rank.0 as u32));
        for (rank, id) in members.iter().enumerate() {
            let host = &self.executors[id].hello;
            let neighbours = members.iter().filter(|other| self.executors[*other].hello.host == host.host).count();
            let assignment = Assignment {
                generation: self.generation,
                rank: Rank(rank as u32),
                peers: peers.clone(),
                source: best.unwrap_or_default(),
                from_storage: best.is_none(),
                threads: (host.cores / neighbours.max(1)).max(1),
            };
            self.say(*id, &ToExecutor::Train(assignment));
        }
    }

    /// Notes how far along an executor's state is.
    fn see(&mut self, id: u64, work: &Work, updates: Option<u64>) {
        if let Some(executor) = self.executors.get_mut(&id) {
            executor.ready = Some((work.number, updates));
        }
    }

    /// Hands an event on; epochs that a generation repeats are told once.
    fn tell(&mut self, event: &Event) {
        if let Event::Epoch { epoch, .. } = event {
            if *epoch <= self.told {
                return;
            }
            self.told = *epoch;
        }
        self.events.emit(event);
    }

    /// Waits a little for the next thing that happens, and keeps the list of executors true.
    fn hear(&mut self) -> Result<Heard, RunError> {
        self.launch.keep_up()?;
        let incoming = match self.inbox.recv_timeout(TICK) {
            Ok(incoming) => incoming,
            Err(RecvTimeoutError::Timeout) => return Ok(Heard::Nothing),
            Err(RecvTimeoutError::Disconnected) => return Err(RunError::Protocol { what: "no more listening" }),
        };
        match incoming {
            Incoming::Joined(id, hello, speaker) => {
                self.executors.insert(id, Executor { hello, speaker, ready: None });
                Ok(Heard::Joined)
            }
            Incoming::Said(id, FromExecutor::Ready { work, updates }) => {
                if let Some(executor) = self.executors.get_mut(&id) {
                    executor.ready = Some((work, updates));
                }
                Ok(Heard::Nothing)
            }
            Incoming::Said(_, FromExecutor::Alive | FromExecutor::Hello(_)) => Ok(Heard::Nothing),
            Incoming::Said(id, message) if self.executors.contains_key(&id) => Ok(Heard::Said(id, message)),
            Incoming::Said(..) => Ok(Heard::Nothing),
            Incoming::Lost(id, reason) => Ok(if self.lose(id, &reason) { Heard::Lost(id) } else { Heard::Nothing }),
        }
    }

    /// Strikes an executor off; false if it was not there.
    fn lose(&mut self, id: u64, reason: &str) -> bool {
        let Some(executor) = self.executors.remove(&id) else { return false };
        executor.speaker.close();
        self.launch.lost(&executor.hello);
        let Hello { pid, host, .. } = executor.hello;
        let message = format!("executor {pid} on {host} is lost: {reason}");
        self.events.emit(&Event::Warning { message });
        true
    }

    fn say_all(&mut self, to: &[u64], message: &ToExecutor) {
        for id in to {
            self.say(*id, message);
        }
    }

    /// One that cannot be spoken to is noticed by its silence.
    fn say(&mut self, to: u64, message: &ToExecutor) {
        if let Some(executor) = self.executors.get(&to)
            && let Err(error) = executor.speaker.send(message)
        {
            tracing::debug!(%error, "an executor does not listen");
            executor.speaker.close();
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        for executor in self.executors.values() {
            // One that does not hear it sees the connection close.
            let _ = executor.speaker.send(&ToExecutor::Goodbye);
            executor.speaker.finish();
        }
        self.launch.finish();
    }
}

/// Lets executors in, each heard by a thread of its own, until the driver is done.
fn accept(listener: &Listener, sender: &Sender<Incoming>, closing: &AtomicBool) {
    let mut next = 0;
    while !closing.load(Ordering::Relaxed) {
        let Some(connection) = listener.accept(TICK) else { continue };
        next += 1;
        let (id, sender) = (next, sender.clone());
        thread::spawn(move || attend(id, Link::new(connection), &sender));
    }
}

/// Hears one executor to its end.
fn attend(id: u64, mut link: Link, sender: &Sender<Incoming>) {
    let speaker = link.speaker();
    let mut first = true;
    loop {
        let incoming = match link.receive() {
            Ok(FromExecutor::Hello(hello)) if first => Incoming::Joined(id, hello, speaker.clone()),
            Ok(message) if !first => Incoming::Said(id, message),
            Ok(_) => return speaker.close(),
            Err(error) => Incoming::Lost(id, remedy::causes(&error).join(": ")),
        };
        if first {
            keep_alive(speaker.clone());
        }
        first = false;
        let last = matches!(incoming, Incoming::Lost(..));
        if sender.send(incoming).is_err() || last {
            return speaker.close();
        }
    }
}

/// Tells an executor every little while that the driver lives.
fn keep_alive(speaker: Speaker) {
    thread::spawn(move || {
        while speaker.send(&ToExecutor::Alive).is_ok() {
            thread::sleep(limits::ALIVE);
        }
    });
}
