//! The guide's program says the same before and after it is ported, and with little near memory. Danger: a guide that leads astray.

#[path = "../../../examples/orders/far.rs"]
mod far;
#[path = "../../../examples/orders/plain.rs"]
mod plain;

use crate::common::{assert_in_budget, heap};

#[test]
fn the_ported_program_reports_the_same() {
    let orders = 40_000;
    let (mut plain, mut far) = (Vec::new(), Vec::new());
    plain::report(orders, &mut plain).unwrap();
    // 5 MiB of orders, 2 MiB of customers.
    let heap = heap(2);
    far::report(&heap, orders, &mut far).unwrap();
    assert_eq!(String::from_utf8(far).unwrap(), String::from_utf8(plain).unwrap());
    let stats = heap.stats();
    assert!(stats.misses > 1000, "{stats:?}");
    assert_in_budget(&heap);
    heap.verify();
}
