//! Arguments of the functions of columns and of collected heaps: whatever bytes a client sends, over whatever region, the function ends, and says a fault by name.
#![no_main]

use farfield_wic::columns::{Compute, ComputeColumn, CopyBytes, Find, Group, Merge, Ranks, Sort, Take, Tally};
use farfield_wic::evacuate::Evacuate;
use farfield_wic::trace::Trace;
use farfield_wic::{Function, Sim, Totals};
use libfuzzer_sys::fuzz_target;

/// Pages of the region.
const PAGES: usize = 16;

fn run<F: Function>(bytes: &[u8]) {
    let Ok((argument, _)) = postcard::take_from_bytes::<F::Argument>(bytes) else { return };
    let region = (0..PAGES * 4096).map(|index| (index * 7) as u8).collect();
    let sim = Sim::new(1, region).steps(4096);
    let _ = sim.run_one::<F>(argument);
    assert_eq!(sim.bytes().len(), PAGES * 4096);
}

fuzz_target!(|bytes: &[u8]| {
    let Some((which, argument)) = bytes.split_first() else { return };
    match which % 17 {
        0 => run::<CopyBytes>(argument),
        1 => run::<Take<1>>(argument),
        2 => run::<Take<8>>(argument),
        3 => run::<Tally>(argument),
        4 => run::<Group<f64>>(argument),
        5 => run::<Group<i16>>(argument),
        6 => run::<Ranks<f32>>(argument),
        7 => run::<Find<u64>>(argument),
        8 => run::<Find<f64>>(argument),
        9 => run::<Sort>(argument),
        10 => run::<Merge>(argument),
        11 => run::<Trace>(argument),
        12 => run::<Evacuate>(argument),
        13 => run::<Compute<f64>>(argument),
        14 => run::<Compute<u8>>(argument),
        15 => run::<ComputeColumn<i32>>(argument),
        _ => run::<Totals<f64>>(argument),
    }
});
