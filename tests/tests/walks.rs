//! Does a function that walks collections answer alike in the heap and beside the memory?
//!
//! Danger: a table at the client that says something else than the pages at the server; elements that were changed near and
//! not written back; a map of another build, whose nodes lie otherwise. `FARFIELD_SEED` repeats the choices.

use farfield::{
    AtServer, CallError, FarArc, FarBTreeMap, FarBox, FarFlatMap, FarFold, FarFoldable, FarFunction, FarList, FarMap,
    FarPlace, FarQueue, FarRef, FarString, FarTraversal, FarVec, FarView, Fault, Fold, Heap, MapEntries, OffloadError,
    Plane, SeededState, Where,
};
use farfield_server::{Config, Server};
use farfield_tests::{MIB, PATIENCE, heap_at, seeded, serve_here};
use farfield_wic::Registry;
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::ops::{ControlFlow, Range};

const PLACES: [Where; 3] = [Where::Client, Where::Server, Where::Auto];

/// Orders of a shop: the map says what each is, the list in which order they came, and the queue which are not paid.
#[derive(FarView, Default)]
struct Shop {
    orders: FarBTreeMap<u64, Order>,
    arrivals: FarList<u64>,
    unpaid: FarQueue<(u64, u32)>,
    prices: FarVec<u32>,
}

#[derive(FarView)]
struct Order {
    customer: FarString,
    state: State,
    lines: Option<FarBox<Lines>>,
}

#[derive(FarView, Clone, Copy, PartialEq, Debug)]
#[repr(u8)]
enum State {
    Open,
    Shipped { day: u16 },
}

/// What was ordered: items and numbers.
#[derive(FarView)]
struct Lines {
    lines: [(u32, u16); 4],
    padding: [u64; 30],
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Report {
    orders: u64,
    shipped: u64,
    days: u64,
    letters: u64,
    cents: u64,
    arrivals: u64,
    unpaid: u64,
    found: Option<u64>,
}

/// A report about the orders of a range, the last one asked for by its key.
struct Reporting;

impl FarFunction for Reporting {
    const NAME: &'static str = "test.reporting";
    const VERSION: u32 = 1;
    type Root = Shop;
    type Argument = Range<u64>;
    type Answer = Report;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Shop>, keys: Range<u64>) -> Result<Report, Fault> {
        let shop = far.follow(root).await?;
        let mut report =
            Report { orders: 0, shipped: 0, days: 0, letters: 0, cents: 0, arrivals: 0, unpaid: 0, found: None };
        let mut orders = far.range(shop.orders, keys.clone());
        while let Some((_, order)) = orders.next().await? {
            report.orders += 1;
            report.letters += far.text(order.customer).await?.len() as u64;
            if let StateView::Shipped { day } = order.state {
                (report.shipped, report.days) = (report.shipped + 1, report.days + u64::from(day));
            }
            if let Some(lines) = order.lines {
                for (item, number) in far.follow(lines).await?.lines {
                    let price = far.item(shop.prices, item as usize).await?.unwrap_or(0);
                    report.cents += u64::from(price) * u64::from(number);
                }
            }
        }
        let mut arrivals = far.items(shop.arrivals);
        while let Some(key) = arrivals.next().await? {
            report.arrivals = report.arrivals.wrapping_mul(31).wrapping_add(key);
        }
        let mut unpaid = far.items(shop.unpaid);
        while let Some((key, cents)) = unpaid.next().await? {
            report.unpaid += if keys.contains(&key) { u64::from(cents) } else { 0 };
        }
        report.found = far.get(shop.orders, keys.end).await?.map(|order| order.customer.len() as u64);
        Ok(report)
    }
}

type TwinOrder = (String, State, [(u32, u16); 4]);

/// The same shop here.
#[derive(Default)]
struct Twin {
    orders: BTreeMap<u64, TwinOrder>,
    arrivals: VecDeque<u64>,
    unpaid: VecDeque<(u64, u32)>,
    prices: Vec<u32>,
}

impl Twin {
    fn report(&self, keys: Range<u64>) -> Report {
        let mut report =
            Report { orders: 0, shipped: 0, days: 0, letters: 0, cents: 0, arrivals: 0, unpaid: 0, found: None };
        for (customer, state, lines) in self.orders.range(keys.clone()).map(|(_, order)| order) {
            report.orders += 1;
            report.letters += customer.len() as u64;
            if let State::Shipped { day } = state {
                (report.shipped, report.days) = (report.shipped + 1, report.days + u64::from(*day));
            }
            for (item, number) in lines {
                report.cents += u64::from(self.prices.get(*item as usize).copied().unwrap_or(0)) * u64::from(*number);
            }
        }
        report.arrivals = self.arrivals.iter().fold(0u64, |sum, key| sum.wrapping_mul(31).wrapping_add(*key));
        report.unpaid =
            self.unpaid.iter().filter(|(key, _)| keys.contains(key)).map(|(_, cents)| u64::from(*cents)).sum();
        report.found = self.orders.get(&keys.end).map(|(customer, ..)| customer.len() as u64);
        report
    }

    /// Changes both in the same way.
    fn change(&mut self, heap: &Heap, shop: &mut Shop, random: &mut Rng, times: usize) {
        for _ in 0..times {
            let scope = heap.enter();
            let key = random.u64(..2000);
            match random.u32(..10) {
                0..4 => {
                    let customer: String = (0..random.usize(..20)).map(|_| random.char(..)).collect();
                    let state = if random.bool() { State::Open } else { State::Shipped { day: random.u16(..) } };
                    let lines = [(); 4].map(|()| (random.u32(..5000), random.u16(..9)));
                    let far_lines =
                        heap.alloc(Lines { lines, padding: [key; 30] }).map_err(|error| error.error).unwrap();
                    let order = Order {
                        customer: FarString::copy_of(&scope, &customer).unwrap(),
                        state,
                        lines: Some(far_lines),
                    };
                    shop.orders.insert(&scope, key, order).map_err(|error| error.error).unwrap();
                    self.orders.insert(key, (customer, state, lines));
                    shop.arrivals.push_back(&scope, key).unwrap();
                    self.arrivals.push_back(key);
                }
                4 => {
                    assert_eq!(shop.orders.remove(&scope, &key).unwrap().is_some(), self.orders.remove(&key).is_some());
                }
                5 => assert_eq!(shop.arrivals.pop_front(&scope).unwrap(), self.arrivals.pop_front()),
                6 => {
                    shop.unpaid.push(&scope, (key, 7 * key as u32)).unwrap();
                    self.unpaid.push_back((key, 7 * key as u32));
                }
                7 => assert_eq!(shop.unpaid.pop(&scope).unwrap(), self.unpaid.pop_front()),
                8 if !self.prices.is_empty() => {
                    let at = random.usize(..self.prices.len());
                    *shop.prices.get_mut(&scope, at).unwrap().unwrap() += 1;
                    self.prices[at] += 1;
                }
                _ => {
                    shop.prices.push(&scope, key as u32).unwrap();
                    self.prices.push(key as u32);
                }
            }
        }
    }
}

fn serve(functions: Registry) -> (Server, [String; 2]) {
    let (server, [tcp, _, shared]) = serve_here(Config { functions, ..Config::default() });
    (server, [tcp, shared])
}

fn heap(url: &str, plane: Plane) -> Heap {
    heap_at(url, plane, MIB)
}

#[test]
fn collections_are_walked_alike_at_both_sides_while_they_change() {
    let (_server, urls) = serve(Registry::standard().with::<AtServer<Reporting>>());
    let mut random = seeded(3913);
    for url in &urls {
        let heap = heap(url, Plane::Page);
        let (mut shop, mut twin) = (Shop::default(), Twin::default());
        for round in 0..60 {
            let times = if round % 10 == 0 { 1500 } else { random.usize(..40) };
            twin.change(&heap, &mut shop, &mut random, times);
            let start = random.u64(..2000);
            let keys = start..random.u64(start..=2000);
            for place in PLACES {
                let report = heap.call::<Reporting>(&shop, keys.clone()).at(place).run();
                assert_eq!(report, Ok(twin.report(keys.clone())), "round {round} {place:?} {url}");
            }
        }
        // What is clean is walked where it is: nothing is written, and nothing comes near.
        let before = heap.stats();
        assert_eq!(heap.call::<Reporting>(&shop, 0..2000).at(Where::Server).run(), Ok(twin.report(0..2000)));
        let after = heap.stats();
        assert_eq!((before.written_pages, before.misses), (after.written_pages, after.misses));
        drop(shop);
        heap.verify();
    }
}

#[test]
fn nodes_and_values_that_move_are_walked_by_the_client_alone() {
    let (_server, [url, _]) = serve(Registry::standard().with::<AtServer<Reporting>>());
    for plane in [Plane::Object, Plane::Hybrid] {
        let heap = heap(&url, plane);
        let (mut shop, mut twin) = (Shop::default(), Twin::default());
        twin.change(&heap, &mut shop, &mut seeded(3914), 3000);
        for place in [Where::Client, Where::Auto, Where::Auto] {
            assert_eq!(heap.call::<Reporting>(&shop, 0..1500).at(place).run(), Ok(twin.report(0..1500)), "{plane:?}");
        }
        let there = heap.call::<Reporting>(&shop, 0..1500).at(Where::Server).run();
        assert_eq!(there, Err(OffloadError::Movable), "{plane:?}");
        drop(shop);
        heap.verify();
    }
}

/// The same function as a server of another build has it.
mod other_build {
    use farfield::{FarBTreeMap, FarFunction, FarList, FarPlace, FarQueue, FarRef, FarString, FarVec, FarView, Fault};
    use std::ops::Range;

    #[derive(FarView)]
    pub(super) struct Shop {
        orders: FarBTreeMap<u64, Order>,
        arrivals: FarList<u64>,
        unpaid: FarQueue<(u64, u32)>,
        prices: FarVec<u32>,
    }

    #[derive(FarView)]
    pub(super) struct Order {
        customer: FarString,
        state: State,
        lines: u64,
    }

    /// With another tag for the same name.
    #[derive(FarView)]
    #[repr(u8)]
    #[allow(dead_code)]
    enum State {
        Shipped { day: u16 },
        Open,
    }

    pub(super) struct Reporting;

    impl FarFunction for Reporting {
        const NAME: &'static str = "test.reporting";
        const VERSION: u32 = 1;
        type Root = Shop;
        type Argument = Range<u64>;
        type Answer = ();

        async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Shop>, _: Range<u64>) -> Result<(), Fault> {
            let shop = far.follow(root).await?;
            let mut prices = far.items(shop.prices);
            while prices.next().await?.is_some() {}
            far.range(shop.orders, ..).count().await?;
            far.items(shop.arrivals).next().await?;
            far.items(shop.unpaid).next().await?;
            Ok(())
        }
    }
}

#[test]
fn a_map_with_other_values_is_refused_by_name_and_auto_goes_on() {
    let (_server, [url, _]) = serve(Registry::standard().with::<AtServer<other_build::Reporting>>());
    let heap = heap(&url, Plane::Page);
    let (mut shop, mut twin) = (Shop::default(), Twin::default());
    twin.change(&heap, &mut shop, &mut seeded(3915), 500);
    let there = heap.call::<Reporting>(&shop, 0..2000).at(Where::Server).run();
    assert_eq!(there, Err(OffloadError::OtherLayout { name: "Order" }));
    assert_eq!(heap.call::<Reporting>(&shop, 0..2000).run(), Ok(twin.report(0..2000)));
}

/// The last number of a list.
struct Last;

impl FarFunction for Last {
    const NAME: &'static str = "test.last";
    const VERSION: u32 = 1;
    type Root = FarList<[u64; 512]>;
    type Argument = ();
    type Answer = Option<u64>;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, FarList<[u64; 512]>>, _: ()) -> Result<Option<u64>, Fault> {
        let list = far.follow(root).await?;
        Ok(far.item(list, list.len().saturating_sub(1)).await?.map(|element| element[511]))
    }
}

#[test]
fn a_list_whose_table_is_too_long_for_a_call_is_walked_by_the_client() {
    let (_server, [url, _]) = serve(Registry::standard().with::<AtServer<Last>>());
    let builder = Heap::builder().near(4 * MIB).near_max(4 * MIB).far(1 << 30);
    let heap = builder.pool(&url).patience(PATIENCE).build().unwrap();
    let mut list = FarList::<[u64; 512]>::new();
    for number in 0..20_000u64 {
        list.push_back(&heap.enter(), [number; 512]).unwrap();
        if number == 6000 {
            for place in PLACES {
                assert_eq!(heap.call::<Last>(&list, ()).at(place).run(), Ok(Some(number)), "{place:?}");
            }
        }
    }
    let there = heap.call::<Last>(&list, ()).at(Where::Server).run();
    assert!(matches!(there, Err(OffloadError::Call(CallError::ArgumentTooLong { .. }))), "{there:?}");
    for place in [Where::Client, Where::Auto, Where::Auto] {
        assert_eq!(heap.call::<Last>(&list, ()).at(place).run(), Ok(Some(19_999)), "{place:?}");
    }
}

/// Number and sum of the elements of a list that are multiples of a number.
struct Multiples;

impl FarFold for Multiples {
    const NAME: &'static str = "test.multiples";
    const VERSION: u32 = 1;
    type Over = FarList<[u64; 512]>;
    type Argument = u64;
    type State = (u64, u64);

    fn begin(_: &u64) -> (u64, u64) {
        (0, 0)
    }

    fn step(state: &mut (u64, u64), element: [u64; 512], of: &u64) -> ControlFlow<()> {
        if element[511].is_multiple_of(*of) {
            *state = (state.0 + 1, state.1 + element[511]);
        }
        ControlFlow::Continue(())
    }
}

#[test]
fn a_fold_of_a_list_of_any_length_goes_to_the_server_in_pieces() {
    let (_server, [url, _]) = serve(Registry::standard().with::<AtServer<Fold<Multiples>>>());
    let builder = Heap::builder().near(4 * MIB).near_max(4 * MIB).far(1 << 30);
    let heap = builder.pool(&url).patience(PATIENCE).build().unwrap();
    let mut list = FarList::<[u64; 512]>::new();
    for number in 0..20_000u64 {
        list.push_back(&heap.enter(), [number; 512]).unwrap();
    }
    for of in [1, 7, 30_000] {
        let multiples = (0..20_000).filter(|number: &u64| number.is_multiple_of(of));
        let expected = (multiples.clone().count() as u64, multiples.sum());
        for place in PLACES {
            assert_eq!(heap.fold::<Multiples>(&list, of).at(place).run(), Ok(expected), "{place:?}");
        }
    }
    let before = heap.stats();
    heap.fold::<Multiples>(&list, 3).at(Where::Server).run().unwrap();
    assert_eq!(heap.stats().misses, before.misses, "nothing comes near");
    // What was changed since is seen.
    list.for_each_mut(&mut heap.enter(), |element| element[511] += 1).unwrap();
    assert_eq!(heap.fold::<Multiples>(&list, 1).at(Where::Server).run(), Ok((20_000, 200_010_000)));
}

/// A warehouse: shelves are far values with short collections of their own, prices are in a flat map.
#[derive(FarView, Default)]
struct Warehouse {
    shelves: FarVec<FarBox<Shelf>>,
    prices: FarFlatMap<u32, u64, SeededState>,
}

#[derive(FarView)]
struct Shelf {
    items: FarList<u32>,
    weights: FarVec<u16>,
    visits: FarQueue<(u64, bool)>,
}

/// Value of the items on some shelves, weight of these, and a digest of the visits, from the last to the first.
type Inventory = (u64, u64, u64);

struct TakeInventory;

impl FarFunction for TakeInventory {
    const NAME: &'static str = "test.take_inventory";
    const VERSION: u32 = 1;
    type Root = Warehouse;
    type Argument = Range<u32>;
    type Answer = Inventory;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Warehouse>, some: Range<u32>) -> Result<Inventory, Fault> {
        let warehouse = far.follow(root).await?;
        let mut found = (0u64, 0u64, 0u64);
        let mut shelves = far.items_in(warehouse.shelves, some.start as usize..some.end as usize);
        while let Some(shelf) = shelves.next().await? {
            let shelf = far.follow(shelf).await?;
            let mut items = far.items(shelf.items);
            while let Some(item) = items.next().await? {
                found.0 = found.0.wrapping_add(far.lookup(warehouse.prices, item).await?.unwrap_or(1));
            }
            let mut weights = far.items(shelf.weights);
            while let Some(weight) = weights.next().await? {
                found.1 += u64::from(weight);
            }
            let mut visits = far.items(shelf.visits).rev();
            while let Some((visit, is_long)) = visits.next().await? {
                found.2 = found.2.rotate_left(5) ^ visit ^ u64::from(is_long);
            }
        }
        Ok(found)
    }
}

/// Number and sum of the prices below a limit.
struct Cheap;

impl FarFold for Cheap {
    const NAME: &'static str = "test.cheap";
    const VERSION: u32 = 1;
    type Over = FarFlatMap<u32, u64, SeededState>;
    type Argument = u64;
    type State = (u64, u64);

    fn begin(_: &u64) -> (u64, u64) {
        (0, 0)
    }

    fn step(state: &mut (u64, u64), (_, price): (u32, u64), limit: &u64) -> ControlFlow<()> {
        if price < *limit {
            *state = (state.0 + 1, state.1.wrapping_add(price));
        }
        ControlFlow::Continue(())
    }
}

type ShelfTwin = (VecDeque<u32>, Vec<u16>, VecDeque<(u64, bool)>);

/// The same warehouse here.
#[derive(Default)]
struct WarehouseTwin {
    shelves: Vec<ShelfTwin>,
    prices: BTreeMap<u32, u64>,
}

impl WarehouseTwin {
    fn take_inventory(&self, some: Range<u32>) -> Inventory {
        let mut found = (0u64, 0u64, 0u64);
        let end = self.shelves.len().min(some.end as usize);
        for (items, weights, visits) in &self.shelves[end.min(some.start as usize)..end] {
            let price = |item: &u32| self.prices.get(item).copied().unwrap_or(1);
            found.0 = items.iter().map(price).fold(found.0, u64::wrapping_add);
            found.1 += weights.iter().copied().map(u64::from).sum::<u64>();
            for (visit, is_long) in visits.iter().rev() {
                found.2 = found.2.rotate_left(5) ^ visit ^ u64::from(*is_long);
            }
        }
        found
    }

    /// Changes both in the same way.
    fn change(&mut self, heap: &Heap, warehouse: &mut Warehouse, random: &mut Rng, times: usize) {
        for _ in 0..times {
            let item = random.u32(..3000);
            if self.shelves.len() < 40 || random.u32(..200) == 0 {
                let shelf = Shelf { items: FarList::new(), weights: FarVec::new(), visits: FarQueue::new() };
                let shelf = heap.alloc(shelf).map_err(|error| error.error).unwrap();
                warehouse.shelves.push(&heap.enter(), shelf).map_err(|error| error.error).unwrap();
                self.shelves.push(ShelfTwin::default());
            }
            let (scope, at) = (heap.enter(), random.usize(..self.shelves.len()));
            let twin = &mut self.shelves[at];
            let shelf = || warehouse.shelves.get(&scope, at).unwrap().unwrap();
            match random.u32(..8) {
                0 | 1 => {
                    let price = random.u64(..);
                    let of = self.prices.insert(item, price);
                    assert_eq!(warehouse.prices.insert(&scope, item, price).unwrap(), of);
                }
                2 => assert_eq!(warehouse.prices.remove(&scope, &item).unwrap(), self.prices.remove(&item)),
                3 if shelf().get(&scope).unwrap().visits.len() > 50 => {
                    let shelf = warehouse.shelves.get_mut(&scope, at).unwrap().unwrap().get_mut(&scope).unwrap();
                    assert_eq!(shelf.visits.pop(&scope).unwrap(), twin.2.pop_front());
                }
                kind => {
                    let shelf = warehouse.shelves.get_mut(&scope, at).unwrap().unwrap().get_mut(&scope).unwrap();
                    match kind {
                        3 | 4 => {
                            shelf.visits.push(&scope, (u64::from(item), item.is_multiple_of(3))).unwrap();
                            twin.2.push_back((u64::from(item), item.is_multiple_of(3)));
                        }
                        5 => {
                            shelf.weights.push(&scope, item as u16).unwrap();
                            twin.1.push(item as u16);
                        }
                        6 => assert_eq!(shelf.items.pop_front(&scope).unwrap(), twin.0.pop_front()),
                        _ => {
                            shelf.items.push_back(&scope, item).unwrap();
                            twin.0.push_back(item);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn short_collections_of_far_values_and_flat_maps_are_read_alike_at_both_sides_while_they_change() {
    let functions = Registry::standard().with::<AtServer<TakeInventory>>().with::<AtServer<Fold<Cheap>>>();
    let (_server, urls) = serve(functions);
    let mut random = seeded(3930);
    for url in &urls {
        let heap = heap(url, Plane::Page);
        let (mut warehouse, mut twin) = (Warehouse::default(), WarehouseTwin::default());
        for round in 0..40 {
            let times = if round % 10 == 0 { 4000 } else { random.usize(..60) };
            twin.change(&heap, &mut warehouse, &mut random, times);
            let start = random.u32(..30);
            let some = start..random.u32(start..80);
            let limit = random.u64(..);
            let cheap = twin.prices.values().filter(|price| **price < limit);
            let cheap = (cheap.clone().count() as u64, cheap.fold(0u64, |sum, price| sum.wrapping_add(*price)));
            for place in PLACES {
                let found = heap.call::<TakeInventory>(&warehouse, some.clone()).at(place).run();
                assert_eq!(found, Ok(twin.take_inventory(some.clone())), "round {round} {place:?} {url}");
                let folded = heap.fold::<Cheap>(&warehouse.prices, limit).at(place).run();
                assert_eq!(folded, Ok(cheap), "round {round} {place:?} {url}");
            }
        }
        // What is clean is read where it is: nothing is written, and nothing comes near.
        let all = || heap.call::<TakeInventory>(&warehouse, 0..1000).at(Where::Server).run();
        assert_eq!(all(), Ok(twin.take_inventory(0..1000)));
        let before = heap.stats();
        assert_eq!(all(), Ok(twin.take_inventory(0..1000)));
        let after = heap.stats();
        assert_eq!((before.written_pages, before.misses), (after.written_pages, after.misses));
        drop(warehouse);
        heap.verify();
    }
}

#[test]
fn collections_are_read_alike_over_members_that_have_different_pages() {
    let functions = || {
        let functions = Registry::standard().with::<AtServer<Reporting>>();
        functions.with::<AtServer<TakeInventory>>().with::<AtServer<Fold<Cheap>>>()
    };
    let small = Config { functions: functions(), capacity_bytes: Some(MIB), ..Config::default() };
    let (_small, [first, ..]) = serve_here(small);
    let [(_one, [one, _]), (_two, [_, two])] = [serve(functions()), serve(functions())];
    let mut random = seeded(3933);
    for (url, is_whole) in [
        (format!("stripe({one},{two})"), false),
        (format!("stripe({one},{two})?group=16M"), true),
        (format!("tier({first},{one})"), false),
        (format!("tier({one},{two})"), true),
    ] {
        let (heap, mut others) = (heap(&url, Plane::Page), 0);
        let (mut shop, mut twin) = (Shop::default(), Twin::default());
        let (mut warehouse, mut stock) = (Warehouse::default(), WarehouseTwin::default());
        for round in 0..24 {
            let times = if round % 8 == 0 { 2000 } else { random.usize(..40) };
            twin.change(&heap, &mut shop, &mut random, times);
            stock.change(&heap, &mut warehouse, &mut random, times);
            let start = random.u64(..2000);
            let keys = start..random.u64(start..=2000);
            let some = random.u32(..30)..random.u32(30..80);
            let limit = random.u64(..);
            let cheap = stock.prices.values().filter(|price| **price < limit);
            let cheap = (cheap.clone().count() as u64, cheap.fold(0u64, |sum, price| sum.wrapping_add(*price)));
            for place in PLACES {
                let mut is_other = |error: Option<OffloadError>| {
                    let is_other = error == Some(OffloadError::OtherMember) && place == Where::Server && !is_whole;
                    others += u32::from(is_other);
                    is_other
                };
                let report = heap.call::<Reporting>(&shop, keys.clone()).at(place).run();
                let is_right = report == Ok(twin.report(keys.clone())) || is_other(report.as_ref().err().copied());
                assert!(is_right, "round {round} {place:?} {url}: {report:?}");
                let found = heap.call::<TakeInventory>(&warehouse, some.clone()).at(place).run();
                let is_right =
                    found == Ok(stock.take_inventory(some.clone())) || is_other(found.as_ref().err().copied());
                assert!(is_right, "round {round} {place:?} {url}: {found:?}");
                let folded = heap.fold::<Cheap>(&warehouse.prices, limit).at(place).run();
                assert!(folded == Ok(cheap) || is_other(folded.err()), "round {round} {place:?} {url}: {folded:?}");
            }
        }
        let counts = heap.stats().calls();
        println!("{url}: {counts}; {others} of a server met a page of another member");
        assert!(counts.at_server > 0 && (is_whole || others > 0), "{url}: {counts}");
        drop((shop, warehouse));
        heap.verify();
    }
}

/// What is behind the elements of a list.
#[derive(FarView)]
struct Behind {
    number: u64,
    payload: [u64; 40],
    deeper: Option<FarArc<Behind>>,
}

/// Sum of all numbers behind the elements, for those elements whose tag is a multiple.
struct SumBehind;

impl FarTraversal for SumBehind {
    const NAME: &'static str = "test.sum_behind";
    const VERSION: u32 = 1;
    const PIECE_ELEMENTS: usize = 500;
    type Over = FarList<(u64, FarBox<Behind>)>;
    type Argument = u64;
    type State = (u64, u64);

    fn begin(_: &u64) -> (u64, u64) {
        (0, 0)
    }

    async fn visit<'f, P: FarPlace>(
        far: &'f P,
        state: &mut (u64, u64),
        (tag, first): <Self::Over as FarFoldable>::Item<'f>,
        of: &u64,
    ) -> Result<ControlFlow<()>, Fault> {
        if tag.is_multiple_of(*of) {
            let mut next = Some(first);
            while let Some(pointer) = next {
                let behind = far.follow(pointer).await?;
                *state = (state.0 + 1, state.1.wrapping_add(behind.number ^ behind.payload[39]));
                next = behind.deeper;
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

#[test]
fn a_fold_that_follows_pointers_goes_to_the_server_in_pieces_and_sees_what_changed() {
    let (_server, [tcp, shared]) = serve(Registry::standard().with::<AtServer<Fold<SumBehind>>>());
    let mut random = seeded(3931);
    for url in [tcp, shared] {
        let heap = heap(&url, Plane::Page);
        let behind = |number: u64, deeper| Behind { number, payload: [number; 40], deeper };
        let ends: Vec<FarArc<Behind>> =
            (0..20).map(|number| heap.alloc_shared(behind(number, None)).unwrap()).collect();
        let (mut list, mut twin) = (FarList::new(), Vec::new());
        for tag in 0..3000u64 {
            let end = random.bool().then(|| random.usize(..ends.len()));
            let number = random.u64(..);
            let first = heap.alloc(behind(number, end.map(|end| ends[end].clone()))).unwrap();
            list.push_back(&heap.enter(), (tag, first)).map_err(|error| error.error).unwrap();
            twin.push((number, number, end));
        }
        for round in 0..5 {
            for of in [1, 7, 4000] {
                let mut expected = (0, 0u64);
                for (number, payload, end) in twin.iter().step_by(of as usize) {
                    expected = (expected.0 + 1, expected.1.wrapping_add(number ^ payload));
                    // Those that are shared have the same number in both fields.
                    expected.0 += u64::from(end.is_some());
                }
                for place in PLACES {
                    let folded = heap.fold::<SumBehind>(&list, of).at(place).run();
                    assert_eq!(folded, Ok(expected), "round {round} {place:?} of {of}");
                }
            }
            let (mut index, changed) = (0, random.usize(..3000));
            let scope = &mut heap.enter();
            list.for_each_mut(scope, |(_, first)| {
                if index % 100 == changed % 100 {
                    first.write(|first| first.number = first.number.wrapping_add(changed as u64)).unwrap();
                    twin[index].0 = twin[index].0.wrapping_add(changed as u64);
                }
                index += 1;
            })
            .unwrap();
        }
        let before = heap.stats().misses;
        heap.fold::<SumBehind>(&list, 1).at(Where::Server).run().unwrap();
        assert_eq!(heap.stats().misses, before, "nothing comes near");
        drop(list);
        drop(ends);
        heap.verify();
    }
}

/// Number and sum of the values of keys that are multiples.
struct OfMultiples;

impl FarFold for OfMultiples {
    const NAME: &'static str = "test.of_multiples";
    const VERSION: u32 = 1;
    type Over = MapEntries<u32, [u64; 12]>;
    type Argument = u32;
    type State = (u64, u64);

    fn begin(_: &u32) -> (u64, u64) {
        (0, 0)
    }

    fn step(state: &mut (u64, u64), (key, value): (u32, [u64; 12]), of: &u32) -> ControlFlow<()> {
        if key.is_multiple_of(*of) {
            *state = (state.0 + 1, state.1.wrapping_add(value[11]));
        }
        ControlFlow::Continue(())
    }
}

#[test]
fn a_fold_of_a_map_sees_what_threads_have_changed_before() {
    let (_server, urls) = serve(Registry::standard().with::<AtServer<Fold<OfMultiples>>>());
    let mut random = seeded(3932);
    for url in &urls {
        let heap = heap(url, Plane::Page);
        let mut map: FarMap<u32, [u64; 12]> = FarMap::new(&heap).unwrap();
        let mut twin = BTreeMap::new();
        for round in 0..12 {
            let changes: Vec<(u32, Option<u64>)> = (0..if round % 6 == 0 { 10_000 } else { 50 })
                .map(|_| (random.u32(..9000), (random.u8(..5) > 0).then(|| random.u64(..))))
                .collect();
            // Each thread has keys of its own, so that it is known which change is the last one of a key.
            std::thread::scope(|threads| {
                for share in 0..2 {
                    let (heap, map, changes) = (&heap, &map, &changes);
                    threads.spawn(move || {
                        for (key, value) in changes.iter().filter(|(key, _)| key % 2 == share) {
                            let scope = heap.enter();
                            let _before = match value {
                                Some(value) => map.insert(&scope, *key, [*value; 12]).unwrap(),
                                None => map.remove(&scope, key).unwrap(),
                            };
                        }
                    });
                }
            });
            for (key, value) in changes {
                let _before = match value {
                    Some(value) => twin.insert(key, value),
                    None => twin.remove(&key),
                };
            }
            for of in [1, 3, 10_000] {
                let values = twin.iter().filter(|(key, _)| key.is_multiple_of(of)).map(|(_, value)| *value);
                let expected = (values.clone().count() as u64, values.fold(0, u64::wrapping_add));
                for place in PLACES {
                    let folded = heap.fold_map::<OfMultiples, _, _, _>(&mut map, of).at(place).run();
                    assert_eq!(folded, Ok(expected), "round {round} {place:?} of {of}");
                }
            }
        }
        let before = heap.stats().misses;
        heap.fold_map::<OfMultiples, _, _, _>(&mut map, 1).at(Where::Server).run().unwrap();
        assert_eq!(heap.stats().misses, before, "nothing comes near");
        drop(map);
        heap.verify();
    }
}
