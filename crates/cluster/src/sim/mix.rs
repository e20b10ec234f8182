//! Mixes of jobs with a wanted ratio of memory to cores, made as published: classes are drawn with
//! a likelihood that falls from those that need memory to those that need cores.

use super::published::{self, CLASSES};
use super::{Scenario, SplitMix64};

/// Jobs of each class among a hundred.
#[derive(Clone, Debug, PartialEq)]
pub struct Mix {
    /// Jobs of each class.
    pub ratio: [u32; CLASSES],
    /// Memory over cores that they need, each as a part of what the nodes have.
    pub memory_to_cores: f64,
}

const DRAWS_MAX: usize = 1_000_000;

/// Draws `count` mixes of the published jobs whose ratio of memory to cores on the nodes of a
/// scenario is between `low` and `high`. Returns fewer if there are hardly any.
pub fn mixes_between(scenario: &Scenario, low: f64, high: f64, count: usize, seed: u64) -> Vec<Mix> {
    let mut random = SplitMix64::new(seed);
    let mut scenario = scenario.clone();
    let mut mixes = Vec::new();
    for _ in 0..DRAWS_MAX {
        if mixes.len() == count {
            break;
        }
        let ratio = draw(&scenario, &mut random);
        scenario.counts = published::counts(100, &ratio);
        let memory_to_cores = scenario.memory_to_cores();
        if (low..=high).contains(&memory_to_cores) {
            mixes.push(Mix { ratio, memory_to_cores });
        }
    }
    mixes
}

fn draw(scenario: &Scenario, random: &mut SplitMix64) -> [u32; CLASSES] {
    let lean = random.unit();
    let need = |class: usize| {
        let kind = &scenario.kinds[class];
        let of_node = scenario.shape.memory_bytes as f64 / f64::from(scenario.shape.cores);
        kind.memory_bytes as f64 / f64::from(kind.cores) / of_node
    };
    let normal = |power: i32| {
        let raw: [f64; CLASSES] = std::array::from_fn(|class| need(class).powi(power));
        let sum: f64 = raw.iter().sum();
        raw.map(|value| value / sum)
    };
    let (by_cores, by_memory) = (normal(-5), normal(5));
    let likelihood: [f64; CLASSES] =
        std::array::from_fn(|class| (1.0 - lean) * by_cores[class] + lean * by_memory[class]);
    let mut ratio = [0; CLASSES];
    for _ in 0..100 {
        let mut rest = random.unit();
        let class = likelihood.iter().position(|part| {
            rest -= part;
            rest < 0.0
        });
        ratio[class.unwrap_or(CLASSES - 1)] += 1;
    }
    // No class is left out.
    for class in 0..CLASSES {
        if ratio[class] == 0 {
            let largest = (0..CLASSES).max_by_key(|&other| ratio[other]).unwrap_or(0);
            ratio[largest] -= 1;
            ratio[class] = 1;
        }
    }
    ratio
}

#[cfg(test)]
mod tests {
    //! Guards against mixes that are not what their range says.
    use super::super::Rules;
    use super::super::published::{Profiles, rack};
    use super::*;

    #[test]
    fn mixes_are_in_their_range_and_have_all_classes() {
        let rack = rack(Rules::published(), Profiles::Polynomials);
        for (low, high) in [(0.75, 0.85), (1.15, 1.25), (1.55, 1.65)] {
            let mixes = mixes_between(&rack, low, high, 20, 1);
            assert_eq!(mixes.len(), 20);
            for mix in &mixes {
                assert!((low..=high).contains(&mix.memory_to_cores));
                assert!(mix.ratio.iter().sum::<u32>() == 100 && mix.ratio.iter().all(|part| *part > 0));
            }
            assert_eq!(mixes, mixes_between(&rack, low, high, 20, 1));
        }
    }

    #[test]
    fn the_ratio_is_the_published_one() {
        let mut rack = rack(Rules::published(), Profiles::Polynomials);
        for (ratio, expected) in [([13, 1, 2, 63, 5, 16], 0.75), ([63, 1, 22, 11, 1, 2], 1.6072)] {
            rack.counts = published::counts(6000, &ratio);
            assert!((rack.memory_to_cores() - expected).abs() < 5e-4, "{} is not {expected}", rack.memory_to_cores());
        }
    }
}
