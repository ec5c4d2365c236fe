//! Numbers as bfloat16: on the wire two bytes each, elsewhere an `f32` with a short mantissa.
//!
//! The `half` crate rounds number by number; without a branch, compilers make vector instructions of it.

/// Rounds to the nearest bfloat16, ties to even.
pub(super) fn round(numbers: &mut [f32]) {
    for number in numbers {
        *number = widen(narrow(*number));
    }
}

/// Appends each number's two bytes, little-endian.
pub(super) fn append(numbers: &[f32], bytes: &mut Vec<u8>) {
    let start = bytes.len();
    bytes.resize(start + 2 * numbers.len(), 0);
    let pairs = bytes[start..].as_chunks_mut().0;
    for (pair, number) in pairs.iter_mut().zip(numbers) {
        *pair = narrow(*number).to_le_bytes();
    }
}

/// Replaces numbers by those of `bytes`.
pub(super) fn replace(numbers: &mut [f32], bytes: &[u8]) {
    for (number, pair) in numbers.iter_mut().zip(bytes.as_chunks().0) {
        *number = widen(u16::from_le_bytes(*pair));
    }
}

/// Adds those of `bytes` to numbers, rounded before and after.
pub(super) fn add(numbers: &mut [f32], bytes: &[u8]) {
    for (number, pair) in numbers.iter_mut().zip(bytes.as_chunks().0) {
        let sum = widen(narrow(*number)) + widen(u16::from_le_bytes(*pair));
        *number = widen(narrow(sum));
    }
}

fn narrow(number: f32) -> u16 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // What is no number must stay none.
    let quiet = bits >> 16 | 0x40;
    (if number.is_nan() { quiet } else { rounded }) as u16
}

fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_rounds_as_the_half_crate_does() {
        let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::MAX, f32::MIN, -0.0];
        let all = (0..=u32::MAX).step_by(16_381).map(f32::from_bits);
        for number in all.chain(special) {
            assert_eq!(narrow(number), half::bf16::from_f32(number).to_bits(), "{number}");
        }
    }

    #[test]
    fn bytes_hold_what_rounding_leaves() {
        let numbers: Vec<f32> = (0..100).map(|index| (index as f32 - 50.0) * 0.0123).collect();
        let mut rounded = numbers.clone();
        round(&mut rounded);
        let mut bytes = vec![1, 2];
        append(&numbers, &mut bytes);
        let mut found = vec![0.0; numbers.len()];
        replace(&mut found, &bytes[2..]);
        assert_eq!(found, rounded);
        add(&mut found, &bytes[2..]);
        assert_eq!(found, rounded.iter().map(|number| 2.0 * number).collect::<Vec<_>>());
    }
}
