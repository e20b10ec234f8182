//! Jobs, racks and profiles of CFM (EuroSys 2020).
//!
//! Numbers are those of the paper and of its authors' simulator (clusterfarmem/clustersim, commit
//! a95d213daca4, `workloads_simu.py` and `workloads_small.py`), which has no licence: the numbers
//! are used, none of its code is.

use super::{Arrivals, JobKind, Rules, Scenario};
use farfield_core::policy::cluster::{NodeShape, RunTime};
use farfield_core::policy::curve::{Curve, Point};

const MIB: u64 = 1 << 20;
/// Nodes, near memory of a node in MiB, and seconds in which all jobs arrive.
const RACK: (u32, u64, f64) = (40, 196_608, 10.0);
const TESTBED: (u32, u64, f64) = (9, 32_768, 15.0);

/// Number of classes of jobs.
pub const CLASSES: usize = 6;

/// A class of jobs as published.
struct PublishedClass {
    name: &'static str,
    /// Cores and MiB of a job on the testbed and in the rack.
    testbed: (u32, u64),
    rack: (u32, u64),
    least: f64,
    /// Seconds by near share, highest power first.
    polynomial: &'static [f64],
    /// Measured seconds with 1, 0.9, … of the memory near.
    seconds: &'static [f64],
}

const PUBLISHED: [PublishedClass; CLASSES] = [
    PublishedClass {
        name: "quicksort",
        testbed: (1, 8250),
        rack: (4, 33_000),
        least: 0.55,
        polynomial: &[-1984.129, 4548.033, -3588.554, 1048.644, 252.997],
        seconds: &[277.16, 303.402, 310.482, 315.227, 311.71, 326.843, 338.1],
    },
    PublishedClass {
        name: "kmeans",
        testbed: (1, 4847),
        rack: (4, 8000),
        least: 0.65,
        polynomial: &[-8258.542, 25_767.366, -28_409.394, 12_549.084, -1289.025],
        seconds: &[359.44, 359.77, 377.9275, 430.557, 508.24, 587.98, 920.575],
    },
    PublishedClass {
        name: "memaslap",
        testbed: (2, 12_288),
        rack: (6, 36_000),
        least: 0.60,
        polynomial: &[-11_626.894, 32_733.914, -31_797.375, 11_484.578, 113.33],
        seconds: &[908.03, 926.2, 950.87, 1007.09, 1119.16, 1272.82, 1416.51],
    },
    PublishedClass {
        name: "linpack",
        testbed: (4, 1600),
        rack: (7, 6000),
        least: 0.75,
        polynomial: &[38.52, -77.88, 26.86, 36.70],
        seconds: &[24.174, 25.981, 27.894, 30.681, 33.057, 35.478],
    },
    PublishedClass {
        name: "spark",
        testbed: (3, 4400),
        rack: (7, 10_000),
        least: 0.90,
        polynomial: &[4689.05, -10_841.59, 7709.92, -1486.13],
        seconds: &[74.472, 81.223, 144.567, 222.01, 234.156, 249.249],
    },
    PublishedClass {
        name: "tf-inception",
        testbed: (2, 2120),
        rack: (6, 6500),
        least: 0.50,
        polynomial: &[-1617.416, 3789.953, -2993.734, 1225.477],
        seconds: &[405.112, 419.762, 428.091, 436.107, 440.242, 475.133],
    },
];

/// Returns the names of the classes, in the order in which mixes count them.
pub fn names() -> [&'static str; CLASSES] {
    PUBLISHED.map(|class| class.name)
}

/// Whether profiles are the published polynomials, or lines through the published measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profiles {
    /// Polynomials, which are not monotone.
    Polynomials,
    /// Falling lines.
    Lines,
}

fn kind(class: &PublishedClass, (cores, mib): (u32, u64), profiles: Profiles) -> JobKind {
    let run_time = match profiles {
        Profiles::Polynomials => RunTime::Polynomial(class.polynomial.to_vec()),
        Profiles::Lines => {
            let seconds = class.seconds[0];
            let point = |(step, &measured): (usize, &f64)| Point {
                near: (10 - step) as f64 / 10.0,
                slowdown: measured / seconds,
            };
            let points: Vec<Point> = class.seconds.iter().enumerate().map(point).collect();
            let curve = Curve::through(&points).expect("published points are numbers");
            RunTime::Measured { seconds, curve }
        }
    };
    JobKind { name: class.name.into(), cores, memory_bytes: mib * MIB, least: class.least, run_time, usage: Vec::new() }
}

/// Returns the simulated rack of the paper: 40 nodes of 48 cores and 192 GiB, of which one becomes a
/// memory server and three cores of each serve reclaim where far memory is used.
pub fn rack(rules: Rules, profiles: Profiles) -> Scenario {
    let (nodes, mib, window_s) = RACK;
    Scenario {
        name: "rack".into(),
        kinds: PUBLISHED.iter().map(|class| kind(class, class.rack, profiles)).collect(),
        counts: vec![0; CLASSES],
        arrivals: Arrivals::Window(window_s),
        nodes,
        memory_servers: 1,
        shape: NodeShape { cores: 48, reclaim_cores: 3, memory_bytes: mib * MIB },
        far_bytes: mib * MIB,
        rules,
    }
}

/// Returns the testbed of the paper: 9 nodes of 8 cores and 32 GiB, of which one becomes a memory
/// server and one core of each serves reclaim where far memory is used.
pub fn testbed(rules: Rules, profiles: Profiles) -> Scenario {
    let (nodes, mib, window_s) = TESTBED;
    Scenario {
        name: "testbed".into(),
        kinds: PUBLISHED.iter().map(|class| kind(class, class.testbed, profiles)).collect(),
        counts: vec![0; CLASSES],
        arrivals: Arrivals::Window(window_s),
        nodes,
        memory_servers: 1,
        shape: NodeShape { cores: 8, reclaim_cores: 1, memory_bytes: mib * MIB },
        far_bytes: mib * MIB,
        rules,
    }
}

/// Returns the numbers of jobs of each class for so many jobs in the given ratio. As published, each
/// number is rounded down.
pub fn counts(jobs: usize, ratio: &[u32]) -> Vec<usize> {
    let sum: u32 = ratio.iter().sum();
    let unit = jobs as f64 / f64::from(sum.max(1));
    ratio.iter().map(|&part| (unit * f64::from(part)) as usize).collect()
}
