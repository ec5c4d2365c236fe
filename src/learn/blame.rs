//! Which features to look at when a loss is not finite.

/// Names at most.
const NAMED: usize = 3;

/// Features of these rows that are not finite; else those of the largest magnitude, with what
/// can be done.
pub(super) fn blame(names: &[String], x: &[f32]) -> String {
    if names.is_empty() {
        // A rank in the middle of a pipeline has no features.
        return "lower the learning rate".to_owned();
    }
    // NaN counts as infinite: it is as bad and must not vanish in a comparison.
    let magnitude = |number: &f32| if number.is_nan() { f32::INFINITY } else { number.abs() };
    let mut largest = vec![0.0_f32; names.len()];
    for row in x.chunks_exact(names.len().max(1)) {
        largest.iter_mut().zip(row).for_each(|(most, number)| *most = most.max(magnitude(number)));
    }
    let mut order: Vec<usize> = (0..names.len()).collect();
    order.sort_by(|a, b| largest[*b].total_cmp(&largest[*a]).then(a.cmp(b)));

    let bad = largest.iter().filter(|most| most.is_infinite()).count();
    if bad > 0 {
        let first: Vec<_> = order.iter().take(bad.min(NAMED)).map(|feature| names[*feature].as_str()).collect();
        let more = if bad > NAMED { format!(" and {} more", bad - NAMED) } else { String::new() };
        return format!("these features are not finite: {}{more}", first.join(", "));
    }
    let first: Vec<_> =
        order.iter().take(NAMED).map(|feature| format!("{} ({:.1e})", names[*feature], largest[*feature])).collect();
    format!("largest values: {}; scale them or lower the learning rate", first.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_features_are_named() {
        let names: Vec<String> = ["a", "b", "c", "d", "e"].map(str::to_owned).into();
        let check = |x: &[f32], expected: &str| assert_eq!(blame(&names, x), expected);
        check(
            &[1.0, -3.2e30, 2.0, 0.0, 0.0, 4.0, 5.0, 2.5, 0.0, 0.0],
            "largest values: b (3.2e30), a (4.0e0), c (2.5e0); scale them or lower the learning rate",
        );
        check(&[1.0, f32::NAN, 2.0, f32::INFINITY, 9.0], "these features are not finite: b, d");
        check(&[f32::NAN; 5], "these features are not finite: a, b, c and 2 more");
    }
}
