//! An executor process: joins a driver and does as told, until there is no more to do or the
//! driver is gone.
//!
//! One thread reads what the driver says, one tells that the process lives, one trains; this one
//! decides. What it trains with stays between generations: the state, and the rows decoded.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::runtime::Handle;

use super::{
    RunError,
    link::{Link, Speaker},
    protocol::{Assignment, EmbedWork, Failure, FromExecutor, Hello, ToExecutor, Work, WorkKind},
    training::{Place, TrainWork, Training, Watch},
};
use crate::{
    data::{Dataset, Feed},
    embed::{EmbedJob, Embedder, WrittenPart},
    ids::Generation,
    learn::{self, AbortHandle, Checkpoint, Control, LearnError, Model, Step, TcpPlace, Trained},
    limits, runs,
    storage::Storage,
    telemetry::{self, Event},
    wire::{self, Listener, Security, WireError},
};

/// Joins the driver at `address` and works for it. Gives back when the driver says goodbye; fails
/// when it is gone or does not let this process in.
pub fn execute(storage: &Storage, address: &str, security: &Security, runtime: &Handle) -> Result<(), RunError> {
    let (link, listener) = join(address, security)?;
    let speaker = link.speaker();
    let (sender, inbox) = mpsc::channel();
    let heart = Heart::start(&speaker);
    let reader = thread::spawn({
        let sender = sender.clone();
        move || read(link, &sender)
    });
    let mut executor = Executor {
        storage: storage.clone(),
        security: security.clone(),
        listener,
        runtime: runtime.clone(),
        speaker: speaker.clone(),
        sender,
        work: None,
        session: None,
        state: Checkpoint::default(),
        feed: None,
        cpu_s_before: 0.0,
    };
    let result = executor.serve(&inbox);
    executor.leave();
    drop(heart);
    speaker.close();
    // It ends with the connection.
    drop(reader);
    result
}

fn join(address: &str, security: &Security) -> Result<(Link, Arc<Listener>), RunError> {
    let link = reach(address, security)?;
    // Other executors reach this one where the driver does.
    let listener = Listener::bind(&format!("{}:0", link.local_host()), security)?;
    let hello = Hello {
        host: runs::host_name(),
        pid: std::process::id(),
        address: listener.address(),
        cores: thread::available_parallelism().map_or(1, std::num::NonZero::get),
    };
    link.speaker().send(&FromExecutor::Hello(hello))?;
    Ok((link, Arc::new(listener)))
}

/// The driver, once it listens: executors may be started before it. One that a driver started itself
/// ends at once if it is gone.
fn reach(address: &str, security: &Security) -> Result<Link, RunError> {
    let patience = if wire::is_of_this_machine(address) { Duration::ZERO } else { limits::EXECUTORS_WAIT };
    let deadline = Instant::now() + patience;
    loop {
        match Link::connect(address, security) {
            Err(RunError::Wire(WireError::Io { source, .. })) if Instant::now() < deadline => {
                tracing::info!(address, %source, "no run listens there yet");
                thread::sleep(limits::KNOCK);
            }
            found => return found,
        }
    }
}

/// What the main thread hears.
enum Heard {
    Driver(Box<ToExecutor>),
    /// A generation ended for this executor.
    Ended(Box<Ended>),
    /// The driver is gone.
    Gone(RunError),
}

struct Ended {
    generation: Generation,
    result: Result<Trained, RunError>,
    state: Checkpoint,
}

fn read(mut link: Link, sender: &Sender<Heard>) {
    loop {
        let heard = match link.receive() {
            Ok(message) => Heard::Driver(Box::new(message)),
            Err(error) => Heard::Gone(error),
        };
        let last = matches!(heard, Heard::Gone(_));
        if sender.send(heard).is_err() || last {
            return;
        }
    }
}

/// Tells the driver every little while that this process lives.
struct Heart(Arc<AtomicBool>);

impl Heart {
    fn start(speaker: &Speaker) -> Self {
        let stopped = Arc::new(AtomicBool::new(false));
        let (speaker, watched) = (speaker.clone(), Arc::clone(&stopped));
        thread::spawn(move || {
            while !watched.load(Ordering::Relaxed) && speaker.send(&FromExecutor::Alive).is_ok() {
                thread::sleep(limits::ALIVE);
            }
        });
        Self(stopped)
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Executor {
    storage: Storage,
    security: Security,
    listener: Arc<Listener>,
    runtime: Handle,
    speaker: Speaker,
    sender: Sender<Heard>,
    work: Option<Ready>,
    session: Option<Session>,
    /// Of the training that `work` is; elsewhere while a generation runs.
    state: Checkpoint,
    feed: Option<Feed>,
    /// Processor seconds before this training.
    cpu_s_before: f64,
}

/// Work that is ready.
enum Ready {
    Train(Arc<Training>),
    Embed { work: Box<EmbedWork>, dataset: Arc<Dataset>, model: Arc<Model> },
}

/// A generation at work.
struct Session {
    generation: Generation,
    stop: Arc<AtomicBool>,
    regroup: Arc<AtomicBool>,
    abort: Arc<Mutex<Aborting>>,
    thread: thread::JoinHandle<()>,
}

/// How to end what a training thread waits for.
#[derive(Default)]
struct Aborting {
    asked: bool,
    handle: Option<AbortHandle>,
}

impl Executor {
    fn serve(&mut self, inbox: &Receiver<Heard>) -> Result<(), RunError> {
        while let Ok(heard) = inbox.recv() {
            match heard {
                Heard::Gone(error) => return Err(error),
                Heard::Ended(ended) => self.ended(*ended)?,
                Heard::Driver(message) => match *message {
                    ToExecutor::Goodbye => return Ok(()),
                    message => self.obey(message)?,
                },
            }
        }
        Ok(())
    }

    fn obey(&mut self, message: ToExecutor) -> Result<(), RunError> {
        match message {
            ToExecutor::Alive | ToExecutor::Goodbye => Ok(()),
            ToExecutor::Work(work) => self.prepare(&work),
            ToExecutor::Train(assignment) => {
                self.train(assignment);
                Ok(())
            }
            ToExecutor::Leave(generation) => {
                if self.session.as_ref().is_some_and(|session| session.generation == generation) {
                    self.leave();
                }
                Ok(())
            }
            ToExecutor::Stop => {
                self.session.iter().for_each(|session| session.stop.store(true, Ordering::Relaxed));
                Ok(())
            }
            ToExecutor::Regroup => {
                self.session.iter().for_each(|session| session.regroup.store(true, Ordering::Relaxed));
                Ok(())
            }
            ToExecutor::Save => {
                let saved = match &self.work {
                    Some(Ready::Train(training)) => self.runtime.block_on(training.save(&self.state)),
                    _ => Ok(()),
                };
                self.answer(saved.map(|()| FromExecutor::Saved).map_err(RunError::from))
            }
            ToExecutor::Write(part) => {
                let written = self.write(part);
                self.answer(written.map(FromExecutor::Written))
            }
        }
    }

    fn answer(&self, answer: Result<FromExecutor, RunError>) -> Result<(), RunError> {
        self.speaker.send(&answer.unwrap_or_else(|error| FromExecutor::Failed(Failure::new(&error))))
    }

    fn prepare(&mut self, work: &Arc<Work>) -> Result<(), RunError> {
        let ready = self.runtime.block_on(get_ready(&self.storage, &work.kind));
        (self.state, self.feed) = (Checkpoint::default(), None);
        self.cpu_s_before = telemetry::cpu_seconds().unwrap_or_default();
        let ready = ready.map(|ready| {
            self.work = Some(ready);
            FromExecutor::Ready { work: work.number, updates: None }
        });
        self.answer(ready)
    }

    /// Starts to train in a thread of its own.
    fn train(&mut self, assignment: Assignment) {
        self.leave();
        let Some(Ready::Train(training)) = &self.work else { return };
        let training = Arc::clone(training);
        let world = assignment.peers.len() as u32;
        let entered = self.runtime.enter();
        let feed = training.feed(assignment.rank, world, self.feed.as_ref());
        drop(entered);
        self.feed = Some(feed.clone());
        let abort = Arc::<Mutex<Aborting>>::default();
        let control = Control { stop: Arc::default(), regroup: Arc::default() };
        let (stop, regroup) = (Arc::clone(&control.stop), Arc::clone(&control.regroup));
        let generation = assignment.generation;
        let mut rank = RankThread {
            training,
            feed,
            assignment,
            control,
            abort: Arc::clone(&abort),
            listener: Arc::clone(&self.listener),
            security: self.security.clone(),
            runtime: self.runtime.clone(),
            speaker: self.speaker.clone(),
            state: std::mem::take(&mut self.state),
        };
        let sender = self.sender.clone();
        let thread = thread::spawn(move || {
            let result = rank.run();
            let ended = Ended { generation, result, state: rank.state };
            // Nobody listens any more: the process ends.
            let _ = sender.send(Heard::Ended(Box::new(ended)));
        });
        self.session = Some(Session { generation, stop, regroup, abort, thread });
    }

    /// Ends the running generation, if there is one.
    fn leave(&mut self) {
        if let Some(session) = &self.session {
            let mut abort = session.abort.lock().unwrap_or_else(PoisonError::into_inner);
            abort.asked = true;
            abort.handle.iter().for_each(AbortHandle::abort);
        }
    }

    fn ended(&mut self, ended: Ended) -> Result<(), RunError> {
        let Ended { generation, result, state } = ended;
        let updates = state.updates;
        self.state = state;
        if let Some(session) = self.session.take() {
            // It has sent its last word.
            let _ = session.thread.join();
        }
        self.speaker.send(&match result {
            Ok(mut trained) => {
                // They stand in the checkpoint, where the driver finds them.
                trained.parameters.clear();
                trained.cpu_s = telemetry::cpu_seconds().unwrap_or_default() - self.cpu_s_before;
                trained.peak_memory_bytes = telemetry::peak_memory_bytes().unwrap_or_default();
                FromExecutor::Trained { generation, trained: Box::new(trained) }
            }
            Err(error) => FromExecutor::Left { generation, updates, failure: Failure::new(&error) },
        })
    }

    fn write(&self, part: usize) -> Result<WrittenPart, RunError> {
        let Some(Ready::Embed { work, dataset, model }) = &self.work else {
            return Err(RunError::Protocol { what: "a file to write, and nothing to encode" });
        };
        let replica = || -> Result<Box<dyn Step>, LearnError> {
            let mut step = learn::burn_step(&model.shape, model.loss, work.device, 0, work.seed)?;
            step.write_parameters(&model.parameters);
            Ok(step)
        };
        let job =
            EmbedJob { plan: &work.table, dataset, model, replica: &replica, executors: 1, staging: &work.staging };
        let stop = AtomicBool::new(false);
        let embedder = Embedder::new(&self.storage, &job, &stop, &|_| {})?;
        let queue = Mutex::new(std::iter::once(part));
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let written = self.runtime.block_on(embedder.executor(&next))?;
        written.into_iter().next().ok_or(RunError::Protocol { what: "a file that there is not" })
    }
}

async fn get_ready(storage: &Storage, work: &WorkKind) -> Result<Ready, RunError> {
    match work {
        WorkKind::Train(work) => Ok(Ready::Train(Arc::new(Training::open(storage, TrainWork::clone(work)).await?))),
        WorkKind::Embed(work) => {
            let dataset = Arc::new(Dataset::open(storage, &work.dataset).await?);
            let model = Arc::new(Model::load(storage, &work.model).await?);
            Ok(Ready::Embed { work: work.clone(), dataset, model })
        }
    }
}

/// A rank of a generation, on its thread.
struct RankThread {
    training: Arc<Training>,
    feed: Feed,
    assignment: Assignment,
    control: Control,
    abort: Arc<Mutex<Aborting>>,
    listener: Arc<Listener>,
    security: Security,
    runtime: Handle,
    speaker: Speaker,
    state: Checkpoint,
}

impl RankThread {
    fn run(&mut self) -> Result<Trained, RunError> {
        let Assignment { generation, rank, peers, source, from_storage, threads } = &self.assignment;
        if *from_storage {
            let stored = if rank == source { self.runtime.block_on(self.training.checkpoint())? } else { None };
            self.state = stored.unwrap_or_default();
        }
        let place = TcpPlace {
            rank: *rank,
            generation: *generation,
            listener: &self.listener,
            peers,
            security: &self.security,
            deadline: limits::COLLECTIVE,
        };
        let comm = learn::tcp(place, |handle| self.abort_with(handle)).map_err(LearnError::from)?;
        let tell = |event: Event| {
            // A driver that is gone is told elsewhere.
            let _ = self.speaker.send(&FromExecutor::Event(event));
        };
        let mut watch = Watch { training: &self.training, runtime: &self.runtime, tell: &tell };
        let place = Place { comm, control: &self.control, threads: *threads, source: *source, observer: &mut watch };
        self.training.run(&self.feed, place, &mut self.state)
    }

    /// Takes the way to end what this thread waits for; at once, if that was asked for before.
    fn abort_with(&self, handle: AbortHandle) {
        let mut abort = self.abort.lock().unwrap_or_else(PoisonError::into_inner);
        if abort.asked {
            handle.abort();
        }
        abort.handle = Some(handle);
    }
}
