//! Sums over two vectors, written so that the compiler turns them into vector instructions.
//! Numbers are added in f64, so that a result agrees with that of `NumPy` to about 1e-12 of its size.

/// Running sums side by side: as many as two registers of 256 bits hold.
const LANES: usize = 8;

/// A number that a vector may consist of.
pub(super) trait Number: Copy {
    /// The same number in f64.
    fn wide(self) -> f64;
}

impl Number for f32 {
    fn wide(self) -> f64 {
        f64::from(self)
    }
}

impl Number for f64 {
    fn wide(self) -> f64 {
        self
    }
}

/// Sum of `a[i] * b[i]`; both of one width.
pub(super) fn dot<A: Number, B: Number>(a: &[A], b: &[B]) -> f64 {
    sum(a, b, |x, y| x * y)
}

/// Sum of `(a[i] - b[i])²`; both of one width.
pub(super) fn squared_distance<A: Number, B: Number>(a: &[A], b: &[B]) -> f64 {
    sum(a, b, |x, y| (x - y) * (x - y))
}

/// Length of a vector.
pub(super) fn norm<A: Number>(a: &[A]) -> f64 {
    dot(a, a).sqrt()
}

#[inline]
fn sum<A: Number, B: Number>(a: &[A], b: &[B], term: impl Fn(f64, f64) -> f64) -> f64 {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += term(x[lane].wide(), y[lane].wide());
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(x, y)| term(x.wide(), y.wide())).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sums_are_those_of_the_plain_loop(pairs in prop::collection::vec((-1e3_f32..1e3, -1e3_f64..1e3), 0..70)) {
            let (a, b): (Vec<f32>, Vec<f64>) = pairs.iter().copied().unzip();
            let plain = |term: fn(f64, f64) -> f64| -> f64 { pairs.iter().map(|(x, y)| term(f64::from(*x), *y)).sum() };
            let close = |got: f64, expected: f64| (got - expected).abs() <= 1e-12 * 70.0 * 1e6;
            prop_assert!(close(dot(&a, &b), plain(|x, y| x * y)));
            prop_assert!(close(squared_distance(&a, &b), plain(|x, y| (x - y).powi(2))));
            prop_assert!(close(norm(&a).powi(2), plain(|x, _| x * x)));
        }
    }
}
