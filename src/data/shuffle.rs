//! Seeded randomness, in one place: the same seed gives the same order on every machine, in
//! every version.

/// The golden ratio's odd 64-bit fraction, `SplitMix64`'s increment.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// What a random number is for: streams of different purposes never meet.
#[derive(Clone, Copy, Debug)]
pub enum Purpose {
    /// Which partition a piece goes to.
    Deal = 1,
    /// Which rows are held out.
    HoldOut = 2,
    /// The order of a partition's splits or rows in an epoch.
    Epoch = 3,
    /// The order of rows within a chunk of an epoch.
    Chunk = 4,
    /// Which rows quantiles are taken from.
    Sample = 5,
}

/// `SplitMix64` (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014):
/// small, fast, and any place of its stream can be asked for at once.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The stream that belongs to a seed, a purpose and further numbers.
    pub fn new(seed: u64, purpose: Purpose, parts: &[u64]) -> Self {
        let absorb = |state: u64, part: &u64| mix((state ^ part).wrapping_add(GAMMA));
        Self(parts.iter().fold(absorb(mix(seed), &(purpose as u64)), absorb))
    }

    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    /// The bits at a place of the stream, from 0, without those before.
    pub fn at(&self, place: u64) -> u64 {
        mix(self.0.wrapping_add(place.wrapping_add(1).wrapping_mul(GAMMA)))
    }

    /// Below `bound`; the bias, `bound / 2^64`, is beyond measure.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Fisher-Yates: every order is as likely as any other.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// A random subset of the rows; whether a row belongs to it can be asked in any order.
#[derive(Clone, Debug)]
pub struct Subset {
    stream: SplitMix64,
    below: u64,
}

impl Subset {
    /// About `fraction` of all rows (0..=1).
    pub fn new(seed: u64, purpose: Purpose, fraction: f64) -> Self {
        // The cast saturates: a fraction of 1 takes all rows.
        let below = (fraction * 2f64.powi(64)) as u64;
        Self { stream: SplitMix64::new(seed, purpose, &[]), below }
    }

    /// Whether the row with this identity belongs to it.
    pub fn contains(&self, row: u64) -> bool {
        self.below == u64::MAX || self.stream.at(row) < self.below
    }

    /// Whether no row belongs to it.
    pub fn is_empty(&self) -> bool {
        self.below == 0
    }
}

/// Stafford's variant 13 of the `MurmurHash3` finalizer: a bijection in which every input bit
/// changes every output bit with probability one half.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs for seed 1234567 of the authors' C code (`splitmix64.c`).
    #[test]
    fn equals_the_reference() {
        let mut stream = SplitMix64(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423_u64];
        assert_eq!([stream.next(), stream.next(), stream.next()], expected);
        let fresh = SplitMix64(1_234_567);
        assert_eq!([fresh.at(0), fresh.at(1), fresh.at(2)], expected);
    }

    #[test]
    fn a_shuffle_is_a_permutation_and_depends_on_every_part() {
        let order = |seed, purpose, parts: &[u64]| {
            let mut items: Vec<u32> = (0..100).collect();
            SplitMix64::new(seed, purpose, parts).shuffle(&mut items);
            items
        };
        let first = order(1, Purpose::Epoch, &[0, 0]);
        assert_eq!(first, order(1, Purpose::Epoch, &[0, 0]));
        for other in [
            order(2, Purpose::Epoch, &[0, 0]),
            order(1, Purpose::Chunk, &[0, 0]),
            order(1, Purpose::Epoch, &[1, 0]),
            order(1, Purpose::Epoch, &[0, 1]),
        ] {
            assert_ne!(first, other);
            let mut sorted = other;
            sorted.sort_unstable();
            assert_eq!(sorted, (0..100).collect::<Vec<u32>>());
        }
    }

    #[test]
    fn a_subset_has_its_fraction() {
        let count = |fraction| {
            let subset = Subset::new(7, Purpose::HoldOut, fraction);
            (0..100_000).filter(|row| subset.contains(*row)).count()
        };
        assert_eq!(count(0.0), 0);
        assert_eq!(count(1.0), 100_000);
        // Four standard deviations.
        assert!(count(0.1).abs_diff(10_000) < 400);
    }
}
