//! Zipf's law: the chance of the k-th of n is proportional to 1/k^s.
//!
//! By rejection and inversion (Hörmann and Derflinger, 1996): no table, so that it disturbs no cache.

use crate::random::Random;

pub(crate) struct Zipf {
    count: f64,
    exponent: f64,
    first: f64,
    last: f64,
    shift: f64,
}

impl Zipf {
    /// Over `count` numbers from 0 on; with exponent 0 all are alike.
    pub(crate) fn new(count: u64, exponent: f64) -> Zipf {
        let mut zipf = Zipf { count: count as f64, exponent, first: 0.0, last: 0.0, shift: 0.0 };
        zipf.first = zipf.integral(1.5) - 1.0;
        zipf.last = zipf.integral(zipf.count + 0.5);
        zipf.shift = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.density(2.0));
        zipf
    }

    /// 0 is the most popular.
    pub(crate) fn sample(&self, random: &mut Random) -> u64 {
        loop {
            let unit = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
            let at = self.last + unit * (self.first - self.last);
            let x = self.inverse(at);
            let k = x.round().clamp(1.0, self.count);
            if k - x <= self.shift || at >= self.integral(k + 0.5) - self.density(k) {
                return k as u64 - 1;
            }
        }
    }

    fn density(&self, x: f64) -> f64 {
        (-self.exponent * x.ln()).exp()
    }

    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        quotient((1.0 - self.exponent) * log, f64::exp_m1) * log
    }

    fn inverse(&self, y: f64) -> f64 {
        let t = (y * (1.0 - self.exponent)).max(-1.0);
        (quotient(t, f64::ln_1p) * y).exp()
    }
}

/// `f(x) / x`, which is 1 in the limit.
fn quotient(x: f64, f: impl Fn(f64) -> f64) -> f64 {
    if x.abs() > 1e-8 { f(x) / x } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popularity_follows_the_law() {
        for exponent in [0.0, 0.8, 1.0, 1.3] {
            let (count, samples) = (1000u64, 1_000_000);
            let zipf = Zipf::new(count, exponent);
            let mut random = Random::new(7);
            let mut seen = vec![0u64; count as usize];
            (0..samples).for_each(|_| seen[zipf.sample(&mut random) as usize] += 1);
            let total: f64 = (1..=count).map(|k| (k as f64).powf(-exponent)).sum();
            for k in [1u64, 2, 10, 100] {
                let expected = (k as f64).powf(-exponent) / total * samples as f64;
                let off = (seen[k as usize - 1] as f64 - expected).abs() / expected.sqrt();
                assert!(off < 5.0, "exponent {exponent}, number {k}: {} instead of {expected}", seen[k as usize - 1]);
            }
        }
    }
}
