//! Random choices that a seed repeats.

use fastrand::Rng;

/// Returns a generator seeded by `FARFIELD_SEED`, or 1, which is printed. `salt` tells the choices of
/// one test from those of another.
pub fn seeded(salt: u64) -> Rng {
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1u64);
    println!("FARFIELD_SEED={seed}");
    Rng::with_seed(seed ^ salt << 32)
}
