//! Consecutive layers of a network on one rank.
//!
//! A batch passes in micro-batches, so that ranks work at the same time. Each rank takes as many
//! forward as it needs to keep those behind it busy, then one forward and one backward in turn
//! (Narayanan et al., "`PipeDream`", 2019, with the flush of Huang et al., "`GPipe`", 2019):
//! activations of no more micro-batches than there are ranks are kept. Gradients are summed in the order of
//! micro-batches, and applied once.

use std::{collections::VecDeque, ops::Range};

use burn::tensor::Tensor;

use super::super::{
    CommError, Communicator, LearnError, NetShape, SharedComm, Step,
    comm::shard,
    network::{Graph, Network, download, take_gradient, total},
};
use crate::{
    ids::Rank,
    pipeline::spec::{DeviceKind, Loss},
};

pub(super) struct Stage {
    network: Network,
    /// Each rank's layers.
    layers: Vec<Range<usize>>,
    micro_batches: u32,
    comm: SharedComm,
    /// Of the whole network; only the own part is ever used.
    parameters: Vec<f32>,
    message: Vec<f32>,
}

/// A micro-batch between forward and backward.
struct InFlight {
    rows: usize,
    /// A leaf, unless this is the first rank.
    input: Tensor<2>,
    /// Each row's loss on the last rank.
    output: Tensor<2>,
}

impl Stage {
    pub fn open(
        shape: &NetShape,
        loss: Loss,
        (device, index): (DeviceKind, usize),
        layers: Vec<Range<usize>>,
        micro_batches: u32,
        comm: SharedComm,
    ) -> Result<Self, LearnError> {
        let own = layers[comm.rank().0 as usize].clone();
        let network = Network::open(shape, loss, device, index, own)?;
        let parameters = vec![0.0; shape.parameters()];
        Ok(Self { network, layers, micro_batches, comm, parameters, message: Vec::new() })
    }

    fn own(&self) -> Range<usize> {
        self.layers[self.comm.rank().0 as usize].clone()
    }

    fn before(&self) -> Option<Rank> {
        self.comm.rank().0.checked_sub(1).map(Rank)
    }

    fn behind(&self) -> Option<Rank> {
        let next = self.comm.rank().0 + 1;
        (next < self.comm.world_size()).then_some(Rank(next))
    }

    /// Rows of each micro-batch.
    fn parts(&self, rows: usize) -> Vec<Range<usize>> {
        let parts = (0..self.micro_batches).map(|part| shard(Rank(part), self.micro_batches, rows));
        parts.filter(|part| !part.is_empty()).collect()
    }

    /// Those rows of a batch.
    fn slice(&self, x: &[f32], rows: &Range<usize>) -> Tensor<2> {
        let width = self.network.features();
        self.network.upload(&x[rows.start * width..rows.end * width], [rows.len(), width])
    }

    /// The next message from a rank, which must be that many rows of that width.
    fn receive(&mut self, from: Rank, rows: usize, width: usize) -> Result<Tensor<2>, LearnError> {
        self.comm.receive(from, &mut self.message)?;
        let (got, expected) = (self.message.len(), rows * width);
        if got != expected {
            return Err(CommError::Mismatch { operation: "receive", rank: from, got, expected }.into());
        }
        Ok(self.network.upload(&self.message, [rows, width]))
    }

    /// What the own layers begin with.
    fn input(&mut self, x: &[f32], rows: &Range<usize>) -> Result<Tensor<2>, LearnError> {
        match self.before() {
            Some(before) => {
                let width = self.network.layers()[self.own().start].inputs;
                self.receive(before, rows.len(), width)
            }
            None => Ok(self.slice(x, rows)),
        }
    }

    /// Hands the output on, or makes each row's loss of it.
    fn hand_on(&mut self, output: Tensor<2>, x: &[f32], rows: &Range<usize>) -> Result<Option<Tensor<2>>, LearnError> {
        let Some(behind) = self.behind() else {
            return Ok(Some(self.network.losses(output, self.slice(x, rows))));
        };
        self.comm.send(behind, &download(output)?)?;
        Ok(None)
    }

    fn forward(&mut self, x: &[f32], rows: &Range<usize>) -> Result<InFlight, LearnError> {
        let input = self.input(x, rows)?.autodiff();
        let input = if self.before().is_some() { input.require_grad() } else { input };
        let output = self.network.forward(self.own(), input.clone(), Graph::Tracked);
        let output = if self.behind().is_some() {
            self.hand_on(output.clone().inner(), x, rows)?;
            output
        } else {
            self.network.losses(output, self.slice(x, rows).autodiff())
        };
        Ok(InFlight { rows: rows.len(), input, output })
    }

    /// Adds a micro-batch's gradients; gives its loss on the last rank.
    fn backward(&mut self, InFlight { rows, input, output }: InFlight, sum: &mut [f32]) -> Result<f64, LearnError> {
        let (loss, mut found) = if let Some(behind) = self.behind() {
            let gradient = self.receive(behind, rows, output.dims()[1])?.autodiff();
            (0.0, (output * gradient).sum().backward())
        } else {
            (total(output.clone().inner())?, output.sum().backward())
        };
        self.network.take_gradients(self.own(), &mut found, |place, gradient| {
            sum[place].iter_mut().zip(gradient).for_each(|(sum, number)| *sum += number);
        })?;
        if let Some(before) = self.before() {
            self.comm.send(before, &take_gradient(&input, &mut found)?)?;
        }
        Ok(loss)
    }

    /// Forward without gradients: each row's loss on the last rank, embeddings on the rank that
    /// makes them.
    fn measure(&mut self, x: &[f32], rows: &Range<usize>) -> Result<(Vec<f32>, Vec<f32>), LearnError> {
        let (own, depth) = (self.own(), self.network.depth());
        let (middle, mut latent) = (depth.clamp(own.start, own.end), Vec::new());
        let mut h = self.input(x, rows)?;
        h = self.network.forward(own.start..middle, h, Graph::Plain);
        if own.contains(&(depth - 1)) {
            latent = download(h.clone())?;
        }
        h = self.network.forward(middle..own.end, h, Graph::Plain);
        let losses = self.hand_on(h, x, rows)?.map_or(Ok(Vec::new()), download)?;
        Ok((losses, latent))
    }
}

impl Step for Stage {
    fn parameters(&self) -> usize {
        self.parameters.len()
    }

    fn read_parameters(&self, out: &mut [f32]) {
        out.copy_from_slice(&self.parameters);
    }

    fn write_parameters(&mut self, parameters: &[f32]) {
        self.parameters.copy_from_slice(parameters);
        self.network.write(parameters);
    }

    /// The loss is known to the last rank, 0 on the others.
    fn gradients(&mut self, x: &[f32], rows: usize, gradients: &mut [f32]) -> Result<f64, LearnError> {
        gradients.fill(0.0);
        let behind = self.comm.world_size() - 1 - self.comm.rank().0;
        let (mut in_flight, mut loss) = (VecDeque::new(), 0.0);
        for part in self.parts(rows) {
            in_flight.push_back(self.forward(x, &part)?);
            if in_flight.len() > behind as usize
                && let Some(first) = in_flight.pop_front()
            {
                loss += self.backward(first, gradients)?;
            }
        }
        for rest in in_flight {
            loss += self.backward(rest, gradients)?;
        }
        Ok(loss)
    }

    /// Known to the last rank, 0 on the others.
    fn loss(&mut self, x: &[f32], rows: usize) -> Result<f64, LearnError> {
        let mut loss = 0.0;
        for part in self.parts(rows) {
            loss += self.measure(x, &part)?.0.into_iter().map(f64::from).sum::<f64>();
        }
        Ok(loss)
    }

    fn encode(
        &mut self,
        x: &[f32],
        rows: usize,
        embeddings: &mut Vec<f32>,
        errors: Option<&mut Vec<f32>>,
    ) -> Result<(), LearnError> {
        let (mut losses, mut latent) = (Vec::new(), Vec::new());
        for part in self.parts(rows) {
            let (part_losses, part_latent) = self.measure(x, &part)?;
            losses.extend(part_losses);
            latent.extend(part_latent);
        }
        let last = self.network.depth() - 1;
        let maker = self.layers.iter().position(|layers| layers.contains(&last)).unwrap_or_default();
        latent.resize(rows * self.network.layers()[last].outputs, 0.0);
        self.comm.broadcast(Rank(maker as u32), &mut latent)?;
        embeddings.extend(latent);
        losses.resize(rows, 0.0);
        let last = Rank(self.comm.world_size() - 1);
        self.comm.broadcast(last, &mut losses)?;
        if let Some(errors) = errors {
            errors.extend(losses);
        }
        Ok(())
    }
}
