//! Guards against orders of events in which the pager loses a write, a page or a count: the models of `src/model`, under a
//! random scheduler and one that finds rare orders (PCT).
//!
//! `FARFIELD_SCHEDULES` is the number of schedules of each scenario under each scheduler (100; 5000 in the deep tier),
//! `FARFIELD_SEED` repeats a run. Not under the usual test harness: the models fork, and nobody else may be in the middle of something then.
#![allow(clippy::disallowed_methods, reason = "what starts and watches the cases runs outside of programs")]

use farfield_pager::model::{scenarios, set_up};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};
use std::time::Instant;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text:?}")))
}

fn run(scheduler: impl Scheduler + 'static, scenario: fn()) {
    let mut config = Config::new();
    config.stack_size = 512 << 10;
    config.silence_warnings = true;
    Runner::new(scheduler, config).run(scenario);
}

fn main() {
    let deep = number("FARFIELD_DEEP").is_some_and(|deep| deep != 0);
    let schedules = number("FARFIELD_SCHEDULES").unwrap_or(if deep { 5000 } else { 100 }) as usize;
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_nanos();
    let seed = number("FARFIELD_SEED").unwrap_or(clock as u64 % 1_000_000_000);
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    // A child that fails must not go on as if it were the test.
    let (parent, usual) = (std::process::id(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        if std::process::id() != parent {
            farfield_os::process::exit_group(101);
        }
    }));
    set_up();
    let chosen = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
    let mut passed = 0;
    for (name, scenario) in scenarios::ALL.into_iter().filter(|(name, _)| chosen(name)) {
        let started = Instant::now();
        println!("model: {name}: {schedules} schedules twice, FARFIELD_SEED={seed}");
        run(RandomScheduler::new_from_seed(seed, schedules), scenario);
        run(PctScheduler::new_from_seed(seed, 4, schedules), scenario);
        println!("model: {name}: ok, {:.1} s", started.elapsed().as_secs_f64());
        passed += 1;
    }
    println!("test result: ok. {passed} passed; 0 failed");
}
