//! Reed–Solomon over GF(256): computes the parity of a row of pages, and any of its pages from
//! enough others.
//!
//! A row has `data` pages and `parity` pages, 16 together at most. Its *part* number `p` is a data
//! page if `p < data`, else a parity page: the sum of all data pages, each times a coefficient.
//! Coefficients are a Cauchy matrix, so any `data` parts are enough, whichever they are. The
//! columns of the matrix are scaled so that the first parity page is the plain sum (XOR). Nothing
//! here allocates, because lanes work inside signal handlers.

use crate::cast::u8_of;

/// Greatest number of parts of a row.
pub const PARTS_MAX: usize = 16;
/// Field polynomial x⁸ + x⁴ + x³ + x² + 1 without its first term.
const POLYNOMIAL: u8 = 0x1d;

/// Powers of two and their logarithms.
const TABLES: ([u8; 255], [u8; 256]) = {
    let (mut powers, mut logs) = ([0; 255], [0; 256]);
    let (mut power, mut log) = (1u8, 0);
    while log < 255 {
        powers[log] = power;
        logs[power as usize] = u8_of(log);
        power = (power << 1) ^ ((power >> 7) * POLYNOMIAL);
        log += 1;
    }
    (powers, logs)
};

fn multiply(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    TABLES.0[(TABLES.1[a as usize] as usize + TABLES.1[b as usize] as usize) % 255]
}

fn invert(a: u8) -> u8 {
    assert!(a != 0);
    TABLES.0[(255 - TABLES.1[a as usize] as usize) % 255]
}

/// A code: the numbers of data and parity pages of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ErasureCode {
    data: usize,
    parity: usize,
}

/// Factors of a linear combination of parts, by part number.
pub type Weights = [u8; PARTS_MAX];

impl ErasureCode {
    /// Creates a code with `data` data pages and `parity` parity pages, at least one of each.
    pub fn new(data: usize, parity: usize) -> ErasureCode {
        assert!(data > 0 && parity > 0 && data + parity <= PARTS_MAX);
        ErasureCode { data, parity }
    }

    /// Returns the number of data pages of a row.
    pub fn data(self) -> usize {
        self.data
    }

    /// Returns the number of parity pages of a row.
    pub fn parity(self) -> usize {
        self.parity
    }

    /// Returns the number of all pages of a row.
    pub fn parts(self) -> usize {
        self.data + self.parity
    }

    /// Returns the factor of data page `column` in `part`.
    pub fn coefficient(self, part: usize, column: usize) -> u8 {
        assert!(part < self.parts() && column < self.data);
        if part < self.data {
            return u8::from(part == column);
        }
        let cauchy = |part: usize| invert(u8_of(part ^ column));
        multiply(cauchy(part), invert(cauchy(self.data)))
    }

    /// Returns the weights that give `target` as a combination of the parts in the set `from`. The
    /// set has as many parts as there are data pages. Parts that are not needed have weight zero.
    pub fn weights(self, from: u16, target: usize) -> Weights {
        assert!(from.count_ones() as usize == self.data && u32::from(from) < 1 << self.parts());
        // One equation for each column: the weighted sum of what the parts have of it is what the
        // target has of it.
        let mut equations = [[0u8; PARTS_MAX + 1]; PARTS_MAX];
        let parts = || (0..self.parts()).filter(|part| from & 1 << part != 0);
        for (column, equation) in equations.iter_mut().enumerate().take(self.data) {
            for (index, part) in parts().enumerate() {
                equation[index] = self.coefficient(part, column);
            }
            equation[PARTS_MAX] = self.coefficient(target, column);
        }
        for step in 0..self.data {
            let pivot = (step..self.data).find(|&row| equations[row][step] != 0).expect("any so many parts are enough");
            equations.swap(step, pivot);
            let scale = invert(equations[step][step]);
            equations[step].iter_mut().for_each(|cell| *cell = multiply(*cell, scale));
            let known = equations[step];
            for (row, equation) in equations.iter_mut().enumerate().take(self.data) {
                let times = equation[step];
                if row != step && times != 0 {
                    equation.iter_mut().zip(known).for_each(|(cell, of)| *cell ^= multiply(of, times));
                }
            }
        }
        let mut weights = [0; PARTS_MAX];
        parts().zip(equations).for_each(|(part, equation)| weights[part] = equation[PARTS_MAX]);
        weights
    }
}

/// Adds `source` times `weight` to `target`. Both have the same length, a multiple of eight bytes.
pub fn add(target: &mut [u8], source: &[u8], weight: u8) {
    assert!(target.len() == source.len() && target.len().is_multiple_of(8));
    let words = target.as_chunks_mut::<8>().0.iter_mut().zip(source.as_chunks::<8>().0);
    if weight == 1 {
        return words.for_each(|(to, from)| *to = (u64::from_le_bytes(*to) ^ u64::from_le_bytes(*from)).to_le_bytes());
    }
    words.for_each(|(to, from)| {
        let (mut sum, mut power) = (u64::from_le_bytes(*to), u64::from_le_bytes(*from));
        // Eight bytes at a time, which compilers turn into vector instructions.
        for bit in 0..8 {
            sum ^= power & (u64::from(weight >> bit) & 1).wrapping_neg();
            power = double(power);
        }
        *to = sum.to_le_bytes();
    });
}

/// Multiplies each of eight bytes by two.
fn double(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let over = word >> 7 & ONES;
    // Each byte that has overflowed becomes the polynomial: bits 4, 3, 2 and 0.
    ((word & (0x7f * ONES)) << 1) ^ over ^ (over << 2) ^ (over << 3) ^ (over << 4)
}

#[cfg(test)]
mod tests {
    //! Danger: a page that is not what it was, from whichever parts it is made.
    use super::*;

    #[test]
    fn it_is_a_field() {
        let slow = |a: u8, b: u8| {
            (0..8)
                .rev()
                .fold(0u8, |sum, bit| (sum << 1) ^ ((sum >> 7) * POLYNOMIAL) ^ if b >> bit & 1 == 1 { a } else { 0 })
        };
        for a in 0..=255 {
            for b in 0..=255 {
                assert_eq!(multiply(a, b), slow(a, b), "{a} {b}");
            }
            assert!(a == 0 || multiply(a, invert(a)) == 1);
            let (mut sum, source) = ([7; 256], core::array::from_fn::<u8, 256, _>(|byte| byte as u8));
            add(&mut sum, &source, a);
            (0..256).for_each(|byte| assert_eq!(sum[byte], 7 ^ multiply(byte as u8, a)));
        }
    }

    /// A row whose data pages are 8 arbitrary bytes each, with its parity.
    fn row(code: ErasureCode) -> [[u8; 8]; PARTS_MAX] {
        let mut parts = [[0; 8]; PARTS_MAX];
        for part in 0..code.parts() {
            for column in 0..code.data() {
                if part < code.data() {
                    parts[part] = (0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(part as u64 + 3)).to_le_bytes();
                    break;
                }
                let source = parts[column];
                add(&mut parts[part], &source, code.coefficient(part, column));
            }
        }
        parts
    }

    #[test]
    fn any_so_many_parts_give_all_others() {
        for data in 1..PARTS_MAX {
            for parity in 1..=(PARTS_MAX - data) {
                let code = ErasureCode::new(data, parity);
                let parts = row(code);
                // All sets of up to ten parts; of larger rows those that a stride meets.
                let step = if code.parts() <= 10 { 1 } else { 37 };
                for from in (0..1u16 << (code.parts() - 1)).step_by(step).map(|set| set << 1 | 1) {
                    if from.count_ones() as usize != data {
                        continue;
                    }
                    for target in 0..code.parts() {
                        let (weights, mut made) = (code.weights(from, target), [0; 8]);
                        for part in 0..code.parts() {
                            assert!(weights[part] == 0 || from & 1 << part != 0);
                            add(&mut made, &parts[part], weights[part]);
                        }
                        assert_eq!(made, parts[target], "{code:?}, part {target} from {from:b}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_first_parity_is_the_plain_sum() {
        let code = ErasureCode::new(9, 7);
        assert!((0..9).all(|column| code.coefficient(9, column) == 1));
    }
}
