//! A simulation: functions over memory of this process, in an order and with faults that a seed
//! decides. The same seed gives the same run.

use crate::executor::{self, Budget, NewTask};
use crate::server::{Dice, Pace, ServerPlace};
use crate::{Fault, Function, Memory, Stop};
use core::cell::{Cell, RefCell};
use farfield_core::PageId;

/// A region in memory over which functions run in a random order.
#[derive(Debug)]
pub struct Sim {
    seed: u64,
    bytes: RefCell<Vec<u8>>,
    fault_one_in: u64,
    steps_max: u64,
}

/// The region during one run.
struct SimMemory<'s> {
    sim: &'s Sim,
    dice: Dice,
    clock: Cell<u64>,
}

/// Time by which every read of the clock advances it, in nanoseconds.
const TICK_NS: u64 = 1000;

impl Sim {
    /// Makes a simulation over a region of these bytes.
    pub fn new(seed: u64, bytes: Vec<u8>) -> Sim {
        Sim { seed, bytes: RefCell::new(bytes), fault_one_in: 0, steps_max: 1 << 20 }
    }

    /// Lets one access in `one_in` fail, on average. 0: none.
    pub fn faults(mut self, one_in: u64) -> Sim {
        self.fault_one_in = one_in;
        self
    }

    /// Sets the most steps that a function may take.
    pub fn steps(mut self, most: u64) -> Sim {
        self.steps_max = most;
        self
    }

    /// Returns a copy of the region.
    pub fn bytes(&self) -> Vec<u8> {
        self.bytes.borrow().clone()
    }

    /// Runs the function for all arguments, side by side.
    ///
    /// # Panics
    /// If the function says that it only reads, and writes.
    pub fn run<F: Function>(&self, arguments: Vec<F::Argument>) -> Vec<Result<F::Answer, Stop>> {
        let memory = SimMemory { sim: self, dice: Dice::new(self.seed), clock: Cell::new(TICK_NS) };
        let place = ServerPlace::new(&memory, Pace::Dice(Dice::new(!self.seed)));
        let budget = Budget { steps_max: self.steps_max, until: None };
        let before = F::ONLY_READS.then(|| self.bytes());
        let mut answers: Vec<_> = arguments.iter().map(|_| None).collect();
        let mut waiting = arguments.into_iter().enumerate();
        let mut slots: Vec<_> = answers.iter().map(|_| Box::pin(None)).collect();
        executor::run(
            &place,
            &mut slots,
            || waiting.next().map(|(id, argument)| NewTask { id, future: F::run(&place, argument), budget }),
            |id, result, _| answers[id] = Some(result),
        );
        assert!(before.is_none_or(|before| before == self.bytes()), "{:?} says that it only reads", F::NAME);
        answers.into_iter().map(|answer| answer.expect("every task ends")).collect()
    }

    /// Runs the function once.
    pub fn run_one<F: Function>(&self, argument: F::Argument) -> Result<F::Answer, Stop> {
        self.run::<F>(vec![argument]).remove(0)
    }
}

impl SimMemory<'_> {
    fn inject_fault(&self, offset: u64) -> Result<(), Fault> {
        match self.sim.fault_one_in {
            0 => Ok(()),
            one_in if self.dice.roll(one_in) > 0 => Ok(()),
            _ => Err(Fault::Corrupt { page: PageId::containing(offset) }),
        }
    }
}

impl Memory for SimMemory<'_> {
    fn region_bytes(&self) -> u64 {
        self.sim.bytes.borrow().len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.inject_fault(offset)?;
        into.copy_from_slice(&self.sim.bytes.borrow()[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.inject_fault(offset)?;
        self.sim.bytes.borrow_mut()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault> {
        work()
    }

    fn clock(&self) -> u64 {
        self.clock.replace(self.clock.get() + TICK_NS)
    }
}
