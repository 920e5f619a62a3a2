// SPDX-License-Identifier: MIT
//! The macro that gives an option struct its setters: one function for each public member, with the member's name.
//!
//! Option structs are `#[non_exhaustive]`, so that a later version may add members. Other crates therefore cannot write them
//! as literals. They call `SessionOptions::new().policy("hgca")`, or assign members.

/// `member: is T` takes a T. `from T` takes a value that converts to T. `some T` takes a T for a member of type `Option<T>`,
/// and `some_from T` a value that converts to T.
macro_rules! setters {
    ($name:ident { $($member:ident: $kind:ident $type:ty,)+ }) => {
        impl $name {
            $(setters!(
                @ $member $kind $type,
                concat!("Sets [`", stringify!($member), "`](#structfield.", stringify!($member), ").")
            );)+
        }
    };
    (@ $member:ident is $type:ty, $doc:expr) => {
        #[doc = $doc]
        #[must_use]
        pub fn $member(mut self, $member: $type) -> Self {
            self.$member = $member;
            self
        }
    };
    (@ $member:ident from $type:ty, $doc:expr) => {
        #[doc = $doc]
        #[must_use]
        pub fn $member(mut self, $member: impl Into<$type>) -> Self {
            self.$member = $member.into();
            self
        }
    };
    (@ $member:ident some $type:ty, $doc:expr) => {
        #[doc = $doc]
        #[must_use]
        pub fn $member(mut self, $member: $type) -> Self {
            self.$member = Some($member);
            self
        }
    };
    (@ $member:ident some_from $type:ty, $doc:expr) => {
        #[doc = $doc]
        #[must_use]
        pub fn $member(mut self, $member: impl Into<$type>) -> Self {
            self.$member = Some($member.into());
            self
        }
    };
}
