//! Far values in places that need no server: a file, compressed memory, memory of a node, mapped files. Danger: other bytes than were stored, and a full place that loses some.

use crate::common::{MIB, Rng, builder, is_deep, seed};
use farfield::{FarBox, FarError, Heap, Plane, PoolError};
use std::time::{Duration, Instant};

type Value = [u64; 128];

/// Half noise.
fn value(number: u64) -> Value {
    std::array::from_fn(|index| {
        if index % 2 == 0 { number } else { (number + index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    })
}

fn urls() -> Vec<String> {
    let folder = std::env::temp_dir();
    let folder = folder.display();
    let mut urls = vec![
        format!("ssd:{folder}?size=64M"),
        format!("ssd:{folder}?size=64M&io=pread"),
        "lz:?size=32M".to_owned(),
        format!("stripe(lz:?size=32M, ssd:{folder}?size=32M)"),
        format!("tier(lz:?size=16M, ssd:{folder}?size=64M)"),
        format!("tier(ram:?size=1M, lz:?size=16M, ssd:{folder}?size=64M)"),
        format!("dax:{folder}?size=64M"),
    ];
    urls.extend(may_bind().then(|| "numa:0?size=64M".to_owned()));
    urls
}

/// May this process choose the node of its memory? Containers often may not.
fn may_bind() -> bool {
    match Heap::builder().near(2 * MIB).far(1 << 30).pool("numa:0?size=64M").build() {
        Err(error) if error.to_string().contains("CAP_SYS_NICE") => {
            eprintln!("skipped: {error}");
            false
        }
        built => built.map(|_| true).unwrap(),
    }
}

#[test]
fn values_come_back_as_they_were_stored() {
    let rounds = if is_deep() { 4000 } else { 1200 };
    for url in urls() {
        for plane in [Plane::Page, Plane::Object] {
            let heap = Heap::builder().near(2 * MIB).far(1 << 30).plane(plane).pool(&*url).build().unwrap();
            let mut random = Rng::with_seed(seed());
            let mut twins: Vec<(FarBox<Value>, u64)> = Vec::new();
            for number in 0..5000 {
                twins.push((heap.alloc(value(number)).unwrap(), number));
            }
            for round in 0..rounds {
                let at = random.usize(..twins.len());
                let scope = heap.enter();
                let (far, number) = &mut twins[at];
                assert_eq!(*far.get(&scope).unwrap(), value(*number), "{url} on {plane:?}");
                if round % 3 == 0 {
                    *number = 1 << 40 | round;
                    *far.get_mut(&scope).unwrap() = value(*number);
                }
            }
            assert!(heap.stats().misses > rounds / 4, "{url} on {plane:?}: most is far");
        }
    }
}

#[test]
fn a_full_place_is_an_error_and_everything_before_stays() {
    let folder = std::env::temp_dir();
    let folder = folder.display();
    let urls = [format!("ssd:{folder}?size=2M"), format!("dax:{folder}?size=2M"), "lz:?size=16M".to_owned()];
    // The smallest packed one takes long to fill.
    for url in &urls[..if is_deep() { 3 } else { 2 }] {
        let builder = Heap::builder().near(MIB).near_max(MIB).far(1 << 30).pool(url.as_str());
        let heap = builder.patience(Duration::from_secs(1)).build().unwrap();
        let mut kept = Vec::new();
        let error = loop {
            assert!(kept.len() < 100_000, "{url} is never full");
            match heap.alloc(value(kept.len() as u64)) {
                Ok(far) => kept.push(far),
                Err(error) => break error.error,
            }
        };
        assert!(matches!(error, FarError::Pool(PoolError::PoolFull { .. })), "{url}: {error}");
        for (number, far) in (0..).zip(&kept) {
            let scope = heap.enter();
            assert_eq!(*far.get(&scope).unwrap(), value(number), "{url}");
        }
    }
}

#[test]
fn heaps_on_mirrors_and_erasure_codes_are_scrubbed() {
    for pool in ["mirror(ram:,ram:,scrub=1ms)", "ec(2,1,ram:,ram:,ram:,scrub=1ms)", "mirror(ram:,ram:,scrub=off)"] {
        let heap = builder().near(2 * MIB).near_max(2 * MIB).far(1 << 30).pool(pool).build().unwrap();
        let values: Vec<_> = (0..8_000u64).map(|number| heap.alloc([number; 128]).unwrap()).collect();
        let (started, is_off) = (Instant::now(), pool.contains("off"));
        while heap.stats().scrub_turns < 2 && !is_off {
            assert!(started.elapsed() < Duration::from_secs(120), "{pool}: {:?}", heap.stats());
            std::thread::sleep(Duration::from_millis(5));
        }
        let stats = heap.stats();
        assert_eq!((stats.scrub_wrong_pages, stats.scrub_mended_pages), (0, 0), "{pool}");
        assert_eq!((stats.scrubbed_pages == 0, stats.scrub_age.is_zero()), (is_off, is_off), "{pool}: {stats:?}");
        for (number, value) in values.iter().enumerate() {
            let scope = heap.enter();
            assert_eq!(*value.get(&scope).unwrap(), [number as u64; 128], "{pool}");
        }
    }
}
