//! Every algorithm, instruction set and element type equals the naive definition.

mod common;

use proptest::prelude::*;
use tilewise_testkit::cases;

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn every_kernel_equals_the_definition(case in common::any_case()) {
        common::check_any(&case)?;
    }
}
