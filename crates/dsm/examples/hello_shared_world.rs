//! Two processes and one heap: who computed what, and what went from one to the other.
//!
//! `cargo run --release -p farfield-dsm --example hello_shared_world`

use farfield_dsm::{DBox, Here, JoinError, NodeBuilder, NodeId, ShareError};

/// A sum, and the process that has computed it.
type Signed = (u64, u32);

fn sum(here: &Here<'_>, numbers: &DBox<[u64; 1000]>) -> Result<Signed, ShareError> {
    Ok((numbers.get(here)?.iter().sum(), std::process::id()))
}

fn greet(here: &Here<'_>) -> Result<(), JoinError> {
    let (first, second) = (here.id(), NodeId(1));
    println!("process {} is node {first} of {}", std::process::id(), here.nodes().count());

    let mut numbers = here.alloc(std::array::from_fn(|index| index as u64))?;
    let (result, process) = sum(here, &numbers)?;
    println!("process {process}: the sum is {result}; the numbers are at node {}", numbers.home());

    // The owner goes to the other node and comes back; the numbers stay, and a copy of them is read
    // there.
    let task = here.spawn_to(second, (numbers,), |here, (numbers,)| (sum(here, &numbers), numbers))?;
    let (read, at_home) = task.join(here)?;
    numbers = at_home;
    let (result, process) = read?;
    println!("process {process}: the sum is {result}; the numbers are at node {}", numbers.home());

    // Who writes has the numbers at its own node.
    let task = here.spawn_to(second, (numbers,), |here, (mut numbers,)| {
        let written = numbers.get_mut(here).map(|mut all| all.iter_mut().for_each(|number| *number *= 2));
        (written.and_then(|()| sum(here, &numbers)), numbers)
    })?;
    let (written, numbers) = task.join(here)?;
    let (result, process) = written?;
    println!("process {process}: doubled, the sum is {result}; the numbers are at node {}", numbers.home());

    let (result, process) = sum(here, &numbers)?;
    println!("process {process}: the sum is {result}; the numbers are at node {}", numbers.home());
    let stats = here.stats();
    println!(
        "node {first} sent {} tasks and asked for {} objects: {} bytes of messages",
        stats.spawns, stats.fetches, stats.message_bytes
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    farfield_dsm::run(&NodeBuilder::new().nodes(2), greet)??;
    Ok(())
}
