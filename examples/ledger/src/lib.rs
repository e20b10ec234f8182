//! Accounts whose history is in far memory, with functions that compute a balance beside it and change
//! entries of a day.
//!
//! The program (`main.rs`) links this crate. The memory server loads it:
//! `farfield serve --functions target/release/libledger.so`.

use farfield::{
    AtServer, AtServerMut, FarBox, FarFunction, FarFunctionMut, FarMut, FarPlace, FarPlaceMut, FarRef, FarView,
    FarViewMut, Fault,
};

farfield_plugin::export!(AtServer<Balance>, AtServerMut<Charge>);

/// An entry of an account, which owns the ones before it.
#[derive(FarView, FarViewMut)]
pub struct Entry {
    /// Day of the entry.
    pub day: u32,
    /// Amount; negative if it was spent.
    pub cents: i64,
    /// The entry before this one.
    pub before: Option<FarBox<Entry>>,
}

/// Returns the balance of an account at the end of a day, in cents.
pub struct Balance;

impl FarFunction for Balance {
    const NAME: &'static str = "ledger.balance";
    const VERSION: u32 = 1;
    type Root = Entry;
    type Argument = u32;
    type Answer = i64;

    async fn run<P: FarPlace>(far: &P, newest: FarRef<'_, Entry>, day: u32) -> Result<i64, Fault> {
        let (mut next, mut sum) = (Some(newest), 0);
        while let Some(pointer) = next {
            let entry = far.follow(pointer).await?;
            if entry.day <= day {
                sum += entry.cents;
            }
            next = entry.before;
        }
        Ok(sum)
    }
}

/// Charges a fee for each entry of some days, which it adds to the entry's amount. Returns how many
/// there are.
pub struct Charge;

impl FarFunctionMut for Charge {
    const NAME: &'static str = "ledger.charge";
    const VERSION: u32 = 1;
    type Root = Entry;
    type Argument = (std::ops::Range<u32>, i64);
    type Answer = u32;

    async fn run<P: FarPlaceMut>(
        far: &P,
        newest: FarMut<'_, Entry>,
        (days, fee): (std::ops::Range<u32>, i64),
    ) -> Result<u32, Fault> {
        let (mut next, mut count) = (Some(newest), 0);
        while let Some(pointer) = next {
            let entry = far.follow_mut(pointer).await?;
            if days.contains(&entry.day) {
                far.change(pointer, |entry| entry.cents += fee).await?;
                count += 1;
            }
            next = entry.before;
        }
        Ok(count)
    }
}
