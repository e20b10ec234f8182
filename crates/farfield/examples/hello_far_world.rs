//! Hello, far world: four times more values than near memory.
//!
//! ```text
//! cargo run --release -p farfield --example hello_far_world                          # far = this process
//! cargo run --release -p farfield --example hello_far_world -- tcp://10.0.0.7:7400   # far = that machine
//! ```

use farfield::{FarBox, Heap};

struct City {
    name: String,
    people: u64,
    /// What makes it large.
    map: [u8; 1000],
    /// Far values own far values.
    twin: Option<FarBox<City>>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut builder = Heap::builder().near(16 << 20);
    for url in std::env::args().skip(1) {
        builder = builder.pool(url);
    }
    let heap = builder.build()?;

    let mut cities = Vec::new();
    for number in 0..30_000u64 {
        let twin = heap.alloc(City { name: format!("Twin of {number}"), people: 1, map: [2; 1000], twin: None })?;
        let city = City { name: format!("City {number}"), people: number, map: [1; 1000], twin: Some(twin) };
        cities.push(heap.alloc(city)?);
    }

    // References live in a scope. A long loop opens one per step, so that what it has passed may leave.
    let mut people = 0;
    for city in &mut cities {
        let scope = heap.enter();
        let city = city.get_mut(&scope)?;
        city.people += 1;
        people += city.people + u64::from(city.map[999]);
    }
    println!("{} cities, {people} people and map tiles", cities.len());

    let scope = heap.enter();
    let city = cities[12_345].get(&scope)?;
    let twin = city.twin.as_ref().expect("every city has one").get(&scope)?;
    println!("{} is the twin of {}; {} person", twin.name, city.name, twin.people);
    drop(scope);

    drop(cities); // runs every destructor, also of what is far
    println!("{:#?}", heap.stats());
    Ok(())
}
