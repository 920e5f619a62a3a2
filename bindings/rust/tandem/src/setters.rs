// SPDX-License-Identifier: MIT
//! The macro that gives a struct of options its setters: a function for each public member, of the member's name.
//!
//! Structs of options are `#[non_exhaustive]`, so that a later version may add members. Other crates cannot write them as
//! literals then, and call `SessionOptions::new().policy("hgca")`, or assign members.

/// `member: is T` takes a T, `from T` what becomes one, `some T` a T for a member of type `Option<T>`, and `some_from T`
/// what becomes one.
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
