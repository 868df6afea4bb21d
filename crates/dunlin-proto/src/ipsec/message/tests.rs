use super::*;

#[test]
fn the_table_of_kinds_is_in_the_order_of_their_variants() {
    for (at, (kind, number, _)) in Kind::ALL.iter().enumerate() {
        assert_eq!(*kind as usize, at);
        assert_eq!(kind.to_wire(), *number);
        assert_eq!(Kind::from_wire(*number), Some(*kind));
    }
}
