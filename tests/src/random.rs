//! Random choices that a seed repeats.

/// See [`Random::new`].
pub struct Random(u64);

impl Random {
    /// From `FARFIELD_SEED`, or 1, which is printed; `salt` tells the choices of one test from those of another.
    pub fn new(salt: u64) -> Random {
        let seed = std::env::var("FARFIELD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1u64);
        println!("FARFIELD_SEED={seed}");
        Random((seed ^ salt << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % end as u64) as usize
    }
}
