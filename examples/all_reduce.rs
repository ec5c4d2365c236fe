//! How fast processes of one machine sum a bucket: `benches/all_reduce/run.sh` compares it.
//!
//! ```text
//!   all_reduce RANKS MIB ROUNDS unix|tcp f32|bf16
//! ```
//!
//! Starts itself once for each rank, tells them the token and each other's addresses over their
//! stdin, and prints what rank 0 measured: seconds of each round, one a line, the first without
//! the warm-up.

#![allow(clippy::print_stdout)]

use std::{
    env,
    error::Error,
    io::{self, BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use emberflow::{
    ids::{Generation, Rank},
    learn::{TcpPlace, Wire, tcp},
    wire::{Listener, Security, Token},
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Rounds before the clock starts: buffers are made in them.
const WARM_UP: usize = 3;

fn main() -> Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [ranks, mib, rounds, way, wire, rank @ ..] = &words[..] else {
        return Err("usage: all_reduce RANKS MIB ROUNDS unix|tcp f32|bf16".into());
    };
    match rank.first() {
        None => lead(ranks.parse()?, &words),
        Some(rank) => {
            let wire = if wire == "bf16" { Wire::Bf16 } else { Wire::F32 };
            let numbers = mib.parse::<usize>()? << 18;
            measure(Rank(rank.parse()?), way == "unix", numbers, rounds.parse()?, wire)
        }
    }
}

/// Starts the ranks and makes them known to each other.
fn lead(ranks: u32, words: &[String]) -> Result<()> {
    let program = env::current_exe()?;
    let start = |rank: u32| {
        let mut command = Command::new(&program);
        command.args(words).arg(rank.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
    };
    let mut children: Vec<Child> = (0..ranks).map(start).collect::<io::Result<_>>()?;
    let token = Token::random()?.to_text();
    let mut told = Vec::new();
    let mut outputs = Vec::new();
    for child in &mut children {
        writeln!(child.stdin.as_mut().ok_or("no stdin")?, "{token}")?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no stdout")?).lines();
        told.push(lines.next().ok_or("a rank ended")??);
        outputs.push(lines);
    }
    for child in &mut children {
        let mut stdin = child.stdin.take().ok_or("no stdin")?;
        told.iter().try_for_each(|address| writeln!(stdin, "{address}"))?;
    }
    for line in outputs.into_iter().flatten() {
        println!("{}", line?);
    }
    for mut child in children {
        child.wait()?;
    }
    Ok(())
}

/// One rank: says where it listens, hears of the others, and sums.
fn measure(rank: Rank, local: bool, numbers: usize, rounds: usize, wire: Wire) -> Result<()> {
    let mut lines = io::stdin().lines();
    let security = Security::plain(Token::from_text(&lines.next().ok_or("no token")??));
    let listener = Listener::bind("127.0.0.1:0", &security)?;
    println!("{}", if local { listener.address() } else { listener.host_and_port().to_owned() });
    let peers: Vec<String> = lines.collect::<io::Result<_>>()?;
    let place = TcpPlace {
        rank,
        generation: Generation(1),
        listener: &listener,
        peers: &peers,
        security: &security,
        deadline: Duration::from_mins(1),
    };
    let mut comm = tcp(place, |_| {})?;
    let mut bucket = vec![1.0_f32; numbers];
    for round in 0..WARM_UP + rounds {
        bucket.fill(1.0);
        comm.barrier()?;
        let start = Instant::now();
        comm.all_reduce_sum(&mut bucket, wire)?;
        if rank == Rank(0) && round >= WARM_UP {
            println!("{}", start.elapsed().as_secs_f64());
        }
        if bucket.iter().any(|sum| *sum != peers.len() as f32) {
            return Err("a wrong sum".into());
        }
    }
    comm.barrier()?;
    Ok(())
}
