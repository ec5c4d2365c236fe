//! What the training loop knows of a network: flat buffers in, flat buffers out.

use super::LearnError;

/// One replica of a network on one device.
pub trait Step: Send {
    /// How many numbers are trained: the length of every flat buffer below.
    fn parameters(&self) -> usize;

    /// Copies the parameters out.
    fn read_parameters(&self, out: &mut [f32]);

    /// Replaces the parameters.
    fn write_parameters(&mut self, parameters: &[f32]);

    /// Forward and backward over `rows` rows of `x` (row-major): writes into `gradients` the
    /// gradient of the **sum over rows of the mean over features** of the loss, and gives that sum. With 0
    /// rows: zeros, and 0.
    fn gradients(&mut self, x: &[f32], rows: usize, gradients: &mut [f32]) -> Result<f64, LearnError>;

    /// The sum over rows of the mean over features of the loss; no gradient.
    fn loss(&mut self, x: &[f32], rows: usize) -> Result<f64, LearnError>;

    /// Appends the embeddings (`rows * latent`) to `embeddings`, and, if asked for, each row's
    /// reconstruction error (its loss, mean over features) to `errors`.
    fn encode(
        &mut self,
        x: &[f32],
        rows: usize,
        embeddings: &mut Vec<f32>,
        errors: Option<&mut Vec<f32>>,
    ) -> Result<(), LearnError>;
}
